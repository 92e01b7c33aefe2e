"""Records the messages of a running cluster into the corpus of this release.

    python -m tests.support.wire.record_corpus

It starts each role as if it were on a host of its own, so that all messages pass the broker, sends requests of every kind,
and writes some messages of each kind that `decoders.py` knows to `corpus/VERSION/messages.json`. Run it once for a release,
when its formats are final, and commit the result: the files of earlier releases are never changed, and tests hold every
later release to decode them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
import tempfile
import threading
from pathlib import Path

import nats
import numpy as np
from nats.aio.msg import Msg
from tritonclient.utils import InferenceServerException

from tests.support.clients.nats_flush import flush
from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.sequences import write_checkpointed
from tests.support.models.zoo import Tensors, write_python_model, write_small_zoo
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import Start
from tests.support.waiting import wait_until
from tests.support.wire.decoders import DECODERS, kind_of
from weir import __version__

CORPUS = Path(__file__).parent / "corpus"

MOST_OF_A_KIND = 4
MOST_BYTES = 16 << 10


class Recorder:
    """Collects messages of different lengths for each kind."""

    def __init__(self) -> None:
        self.found: dict[str, dict[int, Msg]] = {kind: {} for kind in DECODERS}
        self._is_over = threading.Event()
        self.is_listening = threading.Event()

    async def record(self, url: str) -> None:
        """Subscribes to everything until `stop` is called."""

        async def ignore(_: Exception) -> None:
            """The server ends before the recorder does."""

        client = await nats.connect(url, error_cb=ignore)

        async def take(message: Msg) -> None:
            kind = kind_of(message.subject)
            if kind and 0 < len(message.data) <= MOST_BYTES and len(self.found[kind]) < MOST_OF_A_KIND:
                self.found[kind].setdefault(len(message.data), message)

        await client.subscribe(">", cb=take)
        await flush(client)
        self.is_listening.set()
        while not self._is_over.is_set():
            await asyncio.sleep(0.05)
        await client.close()

    def stop(self) -> None:
        """Ends `record`."""
        self._is_over.set()

    def rows(self) -> list[dict[str, str]]:
        """The messages, as JSON."""
        return [
            {"kind": kind, "subject": message.subject, "data": base64.b64encode(message.data).decode()}
            for kind, messages in self.found.items()
            for message in messages.values()
        ]


def send_requests(server: Endpoints) -> None:
    """Requests, streams of requests, errors, loads and unloads, so that every kind of message is sent."""
    small, large = np.array([[1.5, 2.5]], np.float32), np.zeros((1, 100_000), np.float32)
    slow = {"VALUE": np.array([[1]]), "DELAY_MS": np.array([[2000]], np.float32)}
    with server.http() as http, server.grpc() as grpc:
        for values in (small, large):
            http.infer("identity_FP32", http_inputs({"IN": values}), request_id="one", priority=1)
            grpc.infer("identity_FP32", grpc_inputs({"IN": values}), parameters={"mine": "text"})
        with contextlib.suppress(InferenceServerException):
            http.infer("identity_FP32", http_inputs({"IN": np.zeros((1, 2), np.int64)}))
        for delay_s in (0.2, 0.5):
            with contextlib.suppress(InferenceServerException):
                grpc.infer("slow", grpc_inputs(slow), client_timeout=delay_s)
        assert http.is_model_ready("asked")
        http.unload_model("fast")
        wait_until(
            lambda: {row["name"]: row.get("reason") for row in http.get_model_repository_index()}["fast"] == "unloaded"
        )
        http.load_model("fast")
        http.load_model("fast", config=json.dumps({"max_batch_size": 4, "backend": "onnxruntime"}))
        wait_until(lambda: http.is_model_ready("fast"))
        http.get_inference_statistics()
        http.get_model_repository_index()


def run_cluster(start: Start) -> None:
    """A cluster whose roles start, serve `send_requests`, hand over a sequence, and leave."""
    schedulers = [start("scheduler", host=f"scheduler-{number}") for number in range(2)]
    for number in range(2):
        start.worker("--model-control-mode=explicit", "--load-model=*", host=f"worker-{number}")
    traces = (f"--trace-config=triton,file={start.folder / 'traces'}", "--trace-config=level=TIMESTAMPS")
    server = start.gateway("--strict-readiness=false", "--trace-config=rate=2", *traces, host="gateway")
    for model in ("identity_FP32", "slow", "fast", "asked", "sums"):
        wait_until(lambda model=model: server.is_ready(model), 60)
    with server.http() as http:
        for number in range(1, 5):
            value = http_inputs({"IN": np.array([[number]], np.float32)})
            http.infer("sums", value, sequence_id=7, sequence_start=number == 1, sequence_end=number == 4)
            if number == 2:  # who owns the queue next asks workers for the sequences they have
                start("scheduler", "--exit-timeout-secs=5", host="scheduler-2")
                for scheduler in schedulers:
                    scheduler.end(signal.SIGKILL)
    send_requests(server)


def main() -> None:
    """Writes the corpus of this release."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_small_zoo(folder / "models")
        write_checkpointed(folder / "models", "sums", 1)
        tensors: Tensors = {"WHAT": ("BYTES", [1])}
        write_python_model(folder / "models", "asked", "mortal", tensors, {"SAID": ("BYTES", [1])}, 8)
        start = Start(folder)
        recorder = Recorder()
        thread = threading.Thread(target=lambda: asyncio.run(recorder.record(start.nats.url)))
        thread.start()
        try:
            assert recorder.is_listening.wait(20)
            run_cluster(start)
            start.end_all()
        finally:
            recorder.stop()
            thread.join(20)
            start.close()
    missing = [kind for kind, messages in recorder.found.items() if not messages]
    assert not missing, f"nothing was recorded of {missing}"
    target = CORPUS / __version__ / "messages.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(recorder.rows(), indent=1) + "\n")
    print(f"{target}: {len(recorder.rows())} messages of {sum(map(bool, recorder.found.values()))} kinds")


if __name__ == "__main__":
    main()
