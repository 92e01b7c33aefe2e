"""Instances of Python models whose processes die between batches: what becomes of state, and of streams that hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from python_models import IDENTITY, Models

from bus.payloads import PayloadReader
from schemas.errors import WeirError
from schemas.model_config import ModelConfig, ModelParameter, TransactionPolicy
from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest
from schemas.scheduling_config import SequenceBatching
from worker.backend import Execution, Instance, InstanceDevice, InstanceDied, ModelVersion, Result
from worker.backends.python import PythonBackend
from worker.version_health import VersionHealth

INITIALIZE = """
    def initialize(self, args):
        import os
        with open(args["model_repository"] + "/pid", "w") as file:
            file.write(str(os.getpid()))

"""


def instance_of(tmp_path: Path, source: str, health: VersionHealth, **config: object) -> Instance:
    folder = Models(tmp_path).write(source)
    model = ModelVersion("m", 1, folder, ModelConfig(name="m", backend="python", **config), health=health)  # type: ignore[arg-type]
    return PythonBackend().load(model).create_instance(InstanceDevice("KIND_CPU", 0, "m_0_0"))


def wait_until(condition: object, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


def test_a_sequence_is_not_gone_on_with_by_a_process_that_has_not_begun_it(tmp_path: Path) -> None:
    changes: list[str] = []
    health = VersionHealth(lambda: changes.append(health.problem))
    source = IDENTITY.replace("    def execute", INITIALIZE + "    def execute")
    instance = instance_of(tmp_path, source, health, sequence_batching=SequenceBatching())
    (folder,) = tmp_path.iterdir()

    def run(*sequences: tuple[int, int]) -> int:
        requests = [InferRequest("m", "1") for _ in sequences]
        for request, (id, flags) in zip(requests, sequences, strict=True):
            request.correlation_id, request.sequence_flags = id, flags
        return len(instance.execute(requests, Execution(PayloadReader())))

    try:
        assert run((1, SEQUENCE_START), (2, SEQUENCE_START)) == 2
        assert run((1, 0), (3, SEQUENCE_START)) == 2
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        wait_until(lambda: len(changes) == 2)
        assert run((4, SEQUENCE_START)) == 1, "what begins has lost nothing"
        with pytest.raises(InstanceDied, match="with it the state of its sequences"):
            run((4, SEQUENCE_END), (2, 0))
        assert run((5, SEQUENCE_START)) == 1
        assert run((5, SEQUENCE_END)) == 1
    finally:
        instance.close()


class Streams(Execution):
    """Keeps what is sent, and how it ends."""

    def __init__(self) -> None:
        super().__init__(PayloadReader())
        self.responses = 0
        self.errors: list[str] = []

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        self.responses += 1

    def fail(self, error: WeirError) -> None:
        self.errors.append(error.message)


def test_a_stream_without_a_sign_of_life_ends(tmp_path: Path) -> None:
    source = """
        import threading, time
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                threading.Thread(target=self.stream, args=(requests[0].get_response_sender(),), daemon=True).start()

            def stream(self, sender):
                for _ in range(10):
                    sender.send(pb_utils.InferenceResponse())
                    time.sleep(0.05)
                time.sleep(60)
    """
    parameters = {"weir_execution_timeout_ms": ModelParameter(string_value="300")}
    policy = TransactionPolicy(decoupled=True)
    health = VersionHealth()
    instance = instance_of(tmp_path, source, health, model_transaction_policy=policy, parameters=parameters)
    try:
        streams = Streams()
        assert instance.execute([InferRequest("m", "1")], streams) == [None]
        wait_until(lambda: streams.errors)
        assert streams.responses == 10, "as long as something comes it lives"
        assert "lost while it was streaming" in streams.errors[0]
        wait_until(lambda: not health.problem)
    finally:
        instance.close()
