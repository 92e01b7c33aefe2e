"""Repository agents: Triton's `checksum`, and the example of an agent that unpacks an archive."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support.docs.pages import ROOT
from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

AGENTS = ROOT / "examples" / "agents"


def agents(*rows: str) -> str:
    return f"model_repository_agents {{ agents [ {', '.join(rows)} ] }}"


def checksum(expected: str, file: str = "1/model.onnx") -> str:
    return f'{{ name: "checksum" parameters {{ key: "MD5:{file}" value: "{expected}" }} }}'


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def use(folder: Path, *rows: str) -> None:
    with (folder / "config.pbtxt").open("a") as config:
        config.write("\n" + agents(*rows))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("agents") / "models"
    for name in ("right", "wrong", "packed", "unknown"):
        write_identity(models, name, "FP32")
    graph = models / "right" / "1" / "model.onnx"
    use(models / "right", checksum(md5(graph)))
    use(models / "wrong", checksum("0"))
    use(models / "unknown", '{ name: "none" }')
    packed = models / "packed"
    with tarfile.open(packed / "model.tar.gz", "w:gz") as archive:
        archive.add(packed / "1", "1")
    shutil.rmtree(packed / "1")
    use(packed, checksum(md5(packed / "model.tar.gz"), "model.tar.gz"), '{ name: "unpack" }')
    return models


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    options = ("--model-control-mode=explicit", f"--repoagent-directory={AGENTS}")
    with Server(models.parent, models, *options) as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with server.http() as client:
        yield client


def ask(client: triton.InferenceServerClient, model: str) -> list[list[float]]:
    tensor = triton.InferInput("IN", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
    result: list[list[float]] = client.infer(model, [tensor]).as_numpy("OUT").tolist()
    return result


def test_a_model_with_its_sum_loads(client: triton.InferenceServerClient) -> None:
    client.load_model("right")
    assert ask(client, "right") == [[1.0, 1.0]]
    assert client.get_model_config("right")["model_repository_agents"]["agents"][0]["name"] == "checksum"


def test_a_model_with_another_sum_does_not_load(server: Server, client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("wrong")
    refused = "[500] failed to load 'wrong', failed to poll from model repository: "
    assert str(caught.value).startswith(refused)
    assert "Mismatched MD5 hash for file 1/model.onnx, expect: 0, got: " in str(caught.value)


def test_an_unknown_agent_fails_the_load(server: Server, client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException):
        client.load_model("unknown")
    assert f"unable to find 'agent.py' for repo agent 'none', searched: {AGENTS}" in server.log()


def test_an_agent_puts_another_folder_in_the_place_of_the_model(
    server: Server, models: Path, client: triton.InferenceServerClient
) -> None:
    def unpacked() -> list[Path]:
        return [path for path in (models.parent / "tmp").glob("weir-agent-*/unpack") if (path / "1").exists()]

    client.load_model("packed")
    assert ask(client, "packed") == [[1.0, 1.0]]
    (folder,) = unpacked()
    assert f"repository agent 'unpack' of 'packed': unpacked packed into {folder}" in server.log()

    # A reload prepares a folder of its own, and the old one goes.
    (models / "packed" / "labels.txt").write_text("changed")
    client.load_model("packed")
    wait_until(lambda: len(unpacked()) == 1 and unpacked() != [folder])
    assert ask(client, "packed") == [[1.0, 1.0]]

    client.unload_model("packed")
    wait_until(lambda: not unpacked())
    assert server.log().count("repository agent 'unpack' of 'packed': packed was unloaded") == 2
