"""Records the messages of a running cluster into the corpus of this release.

    python -m tests.support.wire.record_corpus

It starts `weir serve` with two schedulers, sends requests of every kind, and writes some messages of each kind that
`decoders.py` knows to `corpus/VERSION/messages.json`. Run it once for a release, when its formats are final, and commit the
result: the files of earlier releases are never changed, and tests hold every later release to decode them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import tempfile
import threading
from pathlib import Path

import nats
import numpy as np
from nats.aio.msg import Msg
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.sequences import write_accumulator
from tests.support.models.zoo import write_small_zoo
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from tests.support.wire.decoders import DECODERS, kind_of
from weir import __version__

CORPUS = Path(__file__).parent / "corpus"

MOST_OF_A_KIND = 4
MOST_BYTES = 16 << 10

NOT_RECORDED = {
    # Between processes of one host these go over links of their own, or only in cases that are rare here. Their formats are
    # in tests/unit/schemas/wire/recorded_messages.json.
    r"work\..+",
    r"abandoned\..+",
    r"release\..+",
    r"drain\..+",
    r"drained\..+",
    r"readiness\..+",
    r"ready\..+",
    r"sequences\..+",
    r"sequence-reports\..+",
}


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
        await client.flush()
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


def send_requests(server: Server) -> None:
    """Requests, streams of requests, errors, loads and unloads, so that every kind of message is sent."""
    small, large = np.array([[1.5, 2.5]], np.float32), np.zeros((1, 100_000), np.float32)
    slow = {"VALUE": np.array([[1]]), "DELAY_MS": np.array([[2000]], np.float32)}
    with server.http() as http, server.grpc() as grpc:
        for values in (small, large):
            http.infer("identity_FP32", http_inputs({"IN": values}), request_id="one", priority=1)
            grpc.infer("identity_FP32", grpc_inputs({"IN": values}), parameters={"mine": "text"})
        for number, is_last in ((1, False), (2, False), (3, True)):
            value = http_inputs({"IN": np.array([[number]], np.float32)})
            http.infer("sums", value, sequence_id=7, sequence_start=number == 1, sequence_end=is_last)
        with contextlib.suppress(InferenceServerException):
            http.infer("identity_FP32", http_inputs({"IN": np.zeros((1, 2), np.int64)}))
        for delay_s in (0.2, 0.5):
            with contextlib.suppress(InferenceServerException):
                grpc.infer("slow", grpc_inputs(slow), client_timeout=delay_s)
        http.unload_model("fast")
        http.load_model("fast")
        http.load_model("fast", config=json.dumps({"max_batch_size": 4, "backend": "onnxruntime"}))
        wait_until(lambda: http.is_model_ready("fast"))
        http.get_inference_statistics()
        http.get_model_repository_index()


def main() -> None:
    """Writes the corpus of this release."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        write_small_zoo(models)
        write_accumulator(models, "sums")
        server = Server(Path(folder), models, "--schedulers=2", "--model-control-mode=explicit", "--load-model=*")
        recorder = Recorder()
        thread = threading.Thread(target=lambda: asyncio.run(recorder.record(server.nats_url)))
        thread.start()
        try:
            assert recorder.is_listening.wait(20)
            send_requests(server)
            server.stop()
        finally:
            recorder.stop()
            thread.join(20)
            server.close()
    missing = [kind for kind, messages in recorder.found.items() if not messages and kind not in NOT_RECORDED]
    assert not missing, f"nothing was recorded of {missing}"
    target = CORPUS / __version__ / "messages.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(recorder.rows(), indent=1) + "\n")
    print(f"{target}: {len(recorder.rows())} messages of {sum(map(bool, recorder.found.values()))} kinds")


if __name__ == "__main__":
    main()
