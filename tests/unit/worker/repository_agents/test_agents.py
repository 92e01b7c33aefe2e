"""Repository agents: the built-in checksum, agents of users, what they return, and how they fail."""

from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path

import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.worker.repository_agents import agents as module
from weir.worker.repository_agents.agents import AppliedAgents

SUM = hashlib.md5(b"weights", usedforsecurity=False).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.bin").write_bytes(b"weights")
    return folder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "agents").mkdir()
    return tmp_path / "agents"


def config(*agents: tuple[str, dict[str, str]]) -> ModelConfig:
    rows = [{"name": name, "parameters": parameters} for name, parameters in agents]
    return ModelConfig.model_validate({"name": "m", "model_repository_agents": {"agents": rows}})


def write_agent(directory: Path, name: str, code: str) -> None:
    (directory / name).mkdir()
    (directory / name / "agent.py").write_text(code)


def failure(model: Path, directory: Path | None, *agents: tuple[str, dict[str, str]]) -> str:
    with pytest.raises(WeirError) as caught:
        AppliedAgents("m", model, config(*agents), directory)
    return caught.value.message


@pytest.mark.parametrize("key", ["MD5:1/model.bin", "md5:1/model.bin"])
def test_a_file_with_its_sum(model: Path, key: str) -> None:
    assert AppliedAgents("m", model, config(("checksum", {key: SUM})), None).path == model


def test_sha256(model: Path) -> None:
    expected = hashlib.sha256(b"weights").hexdigest()
    assert AppliedAgents("m", model, config(("checksum", {"SHA256:1/model.bin": expected})), None).path == model
    assert failure(model, None, ("checksum", {"SHA256:1/model.bin": "0"})).startswith("Mismatched SHA256 hash")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("MD5:1/model.bin", f"Mismatched MD5 hash for file 1/model.bin, expect: 0, got: {SUM}"),
        ("MD5:1/none", "failed to open text file for read 1/none: No such file or directory"),
        ("MD5", "failed to parse key: MD5"),
        ("CRC:1/model.bin", "Unsupported checksum algorithm: CRC"),
        ("MD5:../../secret", "file '../../secret' must stay within the model's folder"),
    ],
)
def test_sums_that_fail_a_load_have_triton_s_texts(model: Path, key: str, text: str) -> None:
    assert text in failure(model, None, ("checksum", {key: "0"}))


def test_an_agent_that_only_looks(model: Path, directory: Path) -> None:
    code = """
class RepositoryAgent:
    def load(self, model):
        import os
        assert model.name == "m" and model.parameters == {"a": "b"} and model.config["name"] == "m"
        assert os.listdir(model.path) == ["1"]
"""
    write_agent(directory, "look", code)
    agents = AppliedAgents("m", model, config(("look", {"a": "b"})), directory)
    assert agents.path == model
    agents.release()


DECRYPT = """
import helper
class RepositoryAgent:
    def load(self, model):
        return helper.copied(model)
    def unload(self, model):
        with open(model.parameters["log"], "a") as log:
            log.write(f"unload {model.path} {sorted(model.parameters)}\\n")
"""
HELPER = """
import pathlib, shutil
def copied(model):
    target = pathlib.Path(model.new_folder()) / "m"
    shutil.copytree(model.path, target)
    return target
"""


def test_an_agent_may_return_another_folder_which_goes_with_the_model(
    model: Path, directory: Path, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        write_agent(directory, name, DECRYPT)
        (directory / name / "helper.py").write_text(HELPER)
    log = tmp_path / "log"
    parameters = {"log": str(log)}
    agents = AppliedAgents("m", model, config(("first", parameters), ("second", parameters)), directory)
    moved = agents.path
    assert moved != model
    assert (moved / "1" / "model.bin").read_bytes() == b"weights"
    assert not log.exists()
    agents.release()
    assert not moved.exists()
    second, first = log.read_text().splitlines()  # the last one first, each with the folder that it was given
    assert first == f"unload {model} ['log']"
    assert second != first
    agents.release()
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise ValueError('no key')", "repository agent 'bad': ValueError: no key"),
        ("return 'relative'", "repository agent 'bad' returned 'relative', which is not the absolute path of a folder"),
        ("return '/nowhere/at/all'", "returned '/nowhere/at/all', which is not the absolute path of a folder"),
        ("import sys; sys.exit(3)", "repository agent 'bad': SystemExit: 3"),
        ("import os; os._exit(3)", "repository agent 'bad' ended with status 3"),
        ("return 5", "repository agent 'bad': TypeError"),
    ],
)
def test_a_failure_of_an_agent_fails_the_load(model: Path, directory: Path, code: str, text: str) -> None:
    write_agent(directory, "bad", f"class RepositoryAgent:\n    def load(self, model):\n        {code}\n")
    assert text in failure(model, directory, ("bad", {}))


def test_when_a_later_agent_fails_those_before_it_unload(model: Path, directory: Path, tmp_path: Path) -> None:
    write_agent(directory, "first", DECRYPT)
    (directory / "first" / "helper.py").write_text(HELPER)
    log = tmp_path / "log"
    text = failure(model, directory, ("first", {"log": str(log)}), ("checksum", {"MD5:1/model.bin": "0"}))
    assert text.startswith("Mismatched MD5 hash")
    assert log.read_text().startswith("unload")


def test_an_agent_without_a_class_or_with_a_syntax_error(model: Path, directory: Path) -> None:
    write_agent(directory, "empty", "")
    assert "agent.py has no class 'RepositoryAgent' with a method 'load'" in failure(model, directory, ("empty", {}))
    write_agent(directory, "broken", "class")
    assert "repository agent 'broken': SyntaxError" in failure(model, directory, ("broken", {}))


def test_an_unknown_agent(model: Path, directory: Path) -> None:
    found = failure(model, directory, ("none", {}))
    assert found == f"unable to find 'agent.py' for repo agent 'none', searched: {directory}"
    assert "--repoagent-directory is not set" in failure(model, None, ("none", {}))
    assert "must not contain path traversal" in failure(model, directory, ("../none", {}))


def test_an_agent_that_hangs_is_killed(model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOAD_TIMEOUT_S", 0.5)
    write_agent(
        directory, "slow", "import time\nclass RepositoryAgent:\n    def load(self, m):\n        time.sleep(60)\n"
    )
    assert "repository agent 'slow' failed: " in failure(model, directory, ("slow", {}))


def test_what_an_agent_prints_is_logged(model: Path, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weir.worker")
    code = "import sys\nclass RepositoryAgent:\n    def load(self, m):\n        print('fetched 3 files')\n"
    write_agent(directory, "talks", code)
    AppliedAgents("m", model, config(("talks", {})), directory)
    assert "repository agent 'talks' of 'm': fetched 3 files" in caplog.messages


def test_an_agent_runs_in_a_process_without_weir(model: Path, directory: Path) -> None:
    code = """
import sys
class RepositoryAgent:
    def load(self, model):
        assert not [name for name in sys.modules if name.partition(".")[0] in ("weir", "numpy")]
        raise ValueError(sys.executable)
"""
    write_agent(directory, "alone", code)
    assert failure(model, directory, ("alone", {})).endswith(sys.executable)
