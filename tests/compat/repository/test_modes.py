"""Model control modes poll and none: clients can't load or unload models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from tests.support.servers.repository import NOT_ALLOWED, NOT_ALLOWED_HERE, Repository, serving, write_adds
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def polling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("poll")
    for number, root in ((1, folder / "models"), (2, folder / "more")):
        root.mkdir()
        write_adds(root, "twice", number)
    write_adds(folder / "models", "there", 1)
    more = f"--model-repository={folder / 'more'}"
    yield from serving(folder, more, "--model-control-mode=poll", "--repository-poll-secs=0.1")


def test_a_polled_repository_is_followed(polling: Repository) -> None:
    assert polling.added("there") == 1
    assert polling.load("there") == polling.unload("there") == polling.load("nobody") == NOT_ALLOWED
    twice = {"name": "twice", "state": "UNAVAILABLE", "reason": "model appears in two or more repositories"}
    assert polling.rows("twice") == [twice]
    assert polling.infer("twice")[0] == 404
    assert not polling.http.is_server_ready()
    shutil.rmtree(polling.root.parent / "more" / "twice")
    wait_until(lambda: polling.http.is_server_ready())
    assert polling.added("twice") == 1
    write_adds(polling.root, "new", 4)
    wait_until(lambda: polling.server.is_ready("new"))
    children = polling.server.python_children()

    (polling.root / "there" / "1" / "model.py").write_text("raise ValueError('broken')")
    wait_until(lambda: "failed to load 'there'" in polling.server.log())
    assert polling.added("there") == 1
    (row,) = polling.rows("there")
    assert row["state"] == "READY"
    assert "could not be loaded" in row["reason"]
    assert "broken" in row["reason"]
    write_adds(polling.root, "there", 8, version=2)
    wait_until(lambda: polling.added("there") == 8)
    wait_until(lambda: polling.rows("there")[0]["state"] == "UNAVAILABLE")
    assert [row["state"] for row in polling.rows("there")] == ["UNAVAILABLE", "READY"]
    assert len(set(children) & set(polling.server.python_children())) == 2, "the others were left alone"

    # A model that moves to another repository is in both for a while: then neither is served, as in Triton.
    shutil.copytree(polling.root / "there", polling.root.parent / "more" / "there")
    wait_until(lambda: not polling.server.is_ready("there"))
    assert polling.added("new") == 4
    shutil.rmtree(polling.root / "there")
    wait_until(lambda: polling.server.is_ready("there"))
    assert polling.added("there") == 8

    shutil.rmtree(polling.root.parent / "more" / "there")
    wait_until(lambda: not polling.rows("there"))
    assert polling.infer("there")[0] == 404
    assert polling.http.is_server_ready()


def test_what_can_not_be_read_is_one_model_s_problem(polling: Repository) -> None:
    root, more = polling.root, polling.root.parent / "more"
    write_adds(root, "steady", 1)
    wait_until(lambda: polling.server.is_ready("steady"))
    (root / "circle").symlink_to("circle")
    os.mkdir(os.fsencode(root) + b"/not-\xff-utf-8")
    (root / "pipe" / "1").mkdir(parents=True)
    os.mkfifo(root / "pipe" / "config.pbtxt")
    (root / "sparse" / "1").mkdir(parents=True)
    with (root / "sparse" / "config.pbtxt").open("wb") as config:
        config.truncate(4 << 30)
    write_adds(root, "later", 2)
    wait_until(lambda: polling.server.is_ready("later"))
    assert polling.added("steady") == 1
    for name, reason in (
        ("circle", "Too many levels of symbolic links"),
        ("not-\\xff-utf-8", "invalid model name"),
        ("pipe", "config.pbtxt is not a regular file"),
        ("sparse", "the file has 4294967296 bytes"),
    ):
        wait_until(lambda name=name: polling.rows(name))
        (row,) = polling.rows(name)
        assert row["state"] == "UNAVAILABLE", row
        assert reason in row["reason"]
    for name in ("circle", "pipe/config.pbtxt", "sparse/config.pbtxt"):
        (root / name).unlink()
    for name in (b"pipe", b"sparse", b"not-\xff-utf-8"):
        shutil.rmtree(os.fsencode(root) + b"/" + name)

    write_adds(more, "elsewhere", 3)
    wait_until(lambda: polling.server.is_ready("elsewhere"))
    more.rename(more.with_name("moved"))
    wait_until(lambda: "failed to read model repository 'more'" in polling.server.log())
    write_adds(root, "last", 5)
    wait_until(lambda: polling.server.is_ready("last"))
    assert polling.added("elsewhere") == 3, "the models of a repository that can't be read stay as they are"
    more.with_name("moved").rename(more)
    wait_until(lambda: "model repository 'more' can be read again" in polling.server.log())
    assert polling.added("elsewhere") == 3


@pytest.fixture(params=["true", "false"], ids=["strict", "lenient"])
def incomplete(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Repository, bool]]:
    """A server, one of whose repositories is missing, and whether its readiness is strict."""
    (tmp_path / "models").mkdir()
    write_adds(tmp_path / "models", "there", 1)
    poll = ("--model-control-mode=poll", "--repository-poll-secs=0.1")
    missing = (f"--model-repository={tmp_path / 'more'}", "--exit-on-error=false")
    for repository in serving(tmp_path, *poll, *missing, f"--strict-readiness={request.param}"):
        yield repository, request.param == "true"


def test_a_server_without_its_repository_is_not_ready_until_it_is_there(
    incomplete: tuple[Repository, bool], tmp_path: Path
) -> None:
    # Triton is not live either: it would not serve the models of other repositories.
    repository, is_strict = incomplete
    wait_until(lambda: repository.server.is_ready("there"))
    for client in (repository.http, repository.grpc):
        assert client.is_server_live()
        assert not client.is_server_ready()
    assert repository.http.get_server_metadata()["name"] == "triton"
    assert repository.added("there") == 1
    (tmp_path / "more").mkdir()
    wait_until(repository.http.is_server_ready)
    (tmp_path / "more").rmdir()
    wait_until(lambda: repository.server.log().count("failed to read model repository 'more'") == 2)
    wait_until(lambda: repository.http.is_server_ready() is not is_strict)


def test_without_control_models_stay_as_they_were_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write_adds(tmp_path / "models", "there", 1)
    for repository in serving(tmp_path):
        assert repository.load("there") == repository.unload("there") == NOT_ALLOWED_HERE
        with pytest.raises(InferenceServerException, match="is not allowed if polling is enabled") as refused:
            repository.grpc.load_model("there")
        assert refused.value.status() == "StatusCode.UNAVAILABLE"
        assert repository.load("there", b"{nope")[0] == 500, "the body is looked at first"
        write_adds(repository.root, "later", 1)
        assert repository.http.get_model_repository_index() == [
            {"name": "later"},
            {"name": "there", "version": "1", "state": "READY"},
        ]
