"""Models pushed into NATS, and workers that download them: the server needs no folder of models."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.integration.models.test_model_placement import EXPLICIT, opened
from tests.integration.models.test_reload import write_plus
from tests.support.clients.stock import http_inputs
from tests.support.models.ensembles import write_ensemble
from tests.support.models.zoo import Tensors, write_identity, write_model, write_python_model
from tests.support.servers.roles import Start
from tests.support.servers.weir_server import clean_environment
from tests.support.waiting import wait_until
from weir.bus.kv.pushed_models import PIECE_BYTES, PushedModels
from weir.bus.nats.access import NO_ACCESS
from weir.bus.nats.connection import Bus
from weir.commands import push as pushing
from weir.commands.running_server import BrokerTarget
from weir.errors import StartError
from weir.options import UsageError
from weir.schemas.wire.model_control import PushedFile, PushedModel

Push = Callable[..., str]


@pytest.fixture
def push(start: Start, capsys: pytest.CaptureFixture[str]) -> Push:
    """What `weir push` prints for these folders."""

    def run(*folders: Path, repository: str = "models", delete: Sequence[str] = (), lists: bool = False) -> str:
        pushing.run(BrokerTarget(start.nats.url, NO_ACCESS), repository, folders, delete, lists)
        return capsys.readouterr().out

    return run


@pytest.mark.timeout(120)
def test_models_come_from_nats(start: Start, push: Push, tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_plus(root, 1.0, 1)
    source = write_python_model(root, "py", "identity", {"IN": ("FP32", [-1])}, {"IN_OUT": ("FP32", [-1])}, 8)
    large = np.random.default_rng(1).bytes(PIECE_BYTES + 1000)
    (source / "1" / "weights.bin").write_bytes(large)
    size = sum(path.stat().st_size for path in (root / "plus").rglob("*") if path.is_file())
    assert push(root / "plus", root / "py") == (
        f"plus: sent 2 files, {size} bytes; 0 were already stored\npy: sent 3 files, 4.2 MB; 0 were already stored\n"
    )
    served = opened(start)
    cache = tmp_path / "cache"
    options = (EXPLICIT, "--model-repository=nats://models", f"--model-cache-dir={cache}")
    first = start("worker", *options)
    array = np.ones((1, 4), np.float32)

    def ask(name: str, output: str = "OUT") -> float:
        return float(client.infer(name, http_inputs({"IN": array})).as_numpy(output)[0, 0])

    with served.http() as client:
        assert [row["name"] for row in client.get_model_repository_index()] == ["plus", "py"]
        client.load_model("plus")
        client.load_model("py")
        assert (ask("plus"), ask("py", "IN_OUT")) == (2.0, 1.0)
        copies = list(cache.glob("weir-mirror-*/models/py/1/weights.bin"))
        assert [copy.read_bytes() for copy in copies] == [large]

        # What is pushed is what the next load finds, on every worker; what is the same is not sent again.
        start("worker", *options)
        write_plus(root, 5.0, 1)
        reply = push(root / "plus", root / "py")
        assert "plus: sent 1 files" in reply
        assert "; 1 were already stored\npy: unchanged, 3 files\n" in reply
        client.load_model("plus")
        assert {ask("plus") for _ in range(20)} == {6.0}
        assert push(lists=True) == f"plus: 2 files, {size} bytes\npy: 3 files, 4.2 MB\n"
        assert push(delete=["plus", "nobody"]) == ("plus: deleted\nnobody: is not in repository 'models'\n")
        client.unload_model("plus")
        with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
            client.load_model("plus")
        assert push(root / "plus") == "plus: sent 0 files, 0 bytes; 2 were already stored\n"
        client.load_model("plus")
        assert first.end() == 0
    start.end_all()
    assert not list(cache.glob("weir-mirror-*")), "what a worker has installed is removed"
    assert list(cache.glob("store-*/py/*/files/1/weights.bin")), "what was fetched is kept"


@pytest.mark.timeout(120)
def test_a_worker_that_polls_follows_what_is_pushed_and_writes_nowhere_else(
    start: Start, push: Push, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    served = opened(start)
    worker = start(
        "worker", "--model-repository=nats://shop-1", "--model-control-mode=poll", "--repository-poll-secs=600"
    )
    write_identity(root, "m", "FP32")
    tensors: tuple[Tensors, Tensors] = {"X": ("FP32", [-1])}, {"Y": ("FP32", [-1])}
    # Its version is an empty folder.
    write_ensemble(root, "chain", *tensors, [("m", {"IN": "X"}, {"OUT": "Y"})], 8)
    push(root / "m", root / "chain", repository="shop-1")
    wait_until(lambda: served.is_ready("m") and served.is_ready("chain"))

    asyncio.run(write_evil(start.nats.url, tmp_path))
    wait_until(lambda: all(f"'{name}' can't be fetched" in worker.log() for name in ("evil", "../../escaped", "lost")))
    assert not (tmp_path / "escaped").exists()
    assert not list((tmp_path / "logs" / "tmp").rglob("escaped"))
    assert "evil: the manifest of model 'evil' can't be read" in push(repository="shop-1", lists=True)
    assert push(delete=["chain", "m"], repository="shop-1") == "chain: deleted\nm: deleted\n"
    wait_until(lambda: not served.is_ready("m"))
    assert worker.end() == 0
    assert not list((tmp_path / "logs" / "tmp").glob("weir-mirror-*"))


async def write_evil(url: str, folder: Path) -> None:
    """Manifests as nobody's `weir push` writes them."""
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "test", background)
        pushed = PushedModels(bus, "shop-1")
        empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        await pushed.write(PushedModel("evil", (PushedFile("../../../../../escaped", 0, empty),)), 0)
        await pushed.write(PushedModel("../../escaped", (PushedFile("1/x", 0, empty),)), 0)
        await pushed.write(PushedModel("lost", (PushedFile("1/x", 3, "0" * 64),)), 0)
        await bus.close()


def test_what_can_t_be_pushed_is_told(start: Start, push: Push, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models", "m", None)
    with pytest.raises(StartError, match="has no files"):
        push(folder)
    os.symlink("/etc/hostname", folder / "1" / "model.onnx")
    with pytest.raises(StartError, match=r"file '1/model.onnx' must stay within the model's folder"):
        push(folder)
    with pytest.raises(StartError, match=rf"It is a folder of models: push each of them, as with {tmp_path}/models/\*"):
        push(tmp_path / "models")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(StartError, match=r"is no model: it has neither a config.pbtxt nor a folder of a version$"):
        push(tmp_path / "nothing")
    with pytest.raises(UsageError, match="'a/b' is not a repository name"):
        push(folder, repository="a/b")
    command = [sys.executable, "-P", "-m", "weir", "push", f"--nats={start.nats.url}", "--list"]
    ran = subprocess.run(command, env=clean_environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
