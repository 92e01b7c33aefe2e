"""Instances of Python models: their arguments, and what happens to state and streams when a process dies or hangs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.models.python_scripts import IDENTITY, Models
from tests.support.waiting import wait_until
from weir.bus.payloads.arena import PayloadReader
from weir.repository.config_text import config_from_dict
from weir.schemas.config.model_config import ModelConfig, ModelParameter, SequenceBatching, TransactionPolicy
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest
from weir.worker.backend_api.interface import Execution, Instance, InstanceDevice, InstanceDied, ModelVersion, Result
from weir.worker.backend_api.version_health import VersionHealth
from weir.worker.backends.python.backend import PythonBackend

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


@pytest.mark.parametrize("filename", ["", "other.py"])
def test_a_missing_file_is_named_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, filename: str) -> None:
    folder = Models(tmp_path).write(IDENTITY)
    (folder / "1" / "model.py").unlink()
    model = ModelVersion("m", 1, folder, ModelConfig(name="m", backend="python", default_model_filename=filename))
    for step in (PythonBackend().describe, PythonBackend().load):
        with pytest.raises(WeirError, match=f"Python model file not found in '1/{filename or 'model.py'}'"):
            step(model)
    assert f"Python model file not found in '{folder / '1' / (filename or 'model.py')}'" in caplog.text


def test_a_new_process_does_not_continue_sequences_of_its_predecessor(tmp_path: Path) -> None:
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
        assert run((4, SEQUENCE_START)) == 1, "a sequence that starts has lost nothing"
        with pytest.raises(InstanceDied, match="the state of its sequences is lost"):
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


def test_a_stream_without_progress_fails(tmp_path: Path) -> None:
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
        assert streams.responses == 10, "it lives while responses arrive"
        assert "lost while it was streaming" in streams.errors[0]
        wait_until(lambda: not health.problem)
    finally:
        instance.close()


ARGUMENTS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        reported = np.array([json.dumps(self.args)], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("T", reported)]) for _ in requests]
"""


@pytest.mark.parametrize(
    ("kind", "device_id", "reported"),
    [("KIND_CPU", 0, "CPU"), ("KIND_GPU", 3, "GPU"), ("KIND_MODEL", 0, "MODEL"), ("KIND_AUTO", 0, "CPU")],
)
def test_kind_and_device(tmp_path: Path, kind: str, device_id: int, reported: str) -> None:
    """`initialize` gets the kind and the device of the instance; inputs lie in host memory also on a GPU."""
    config = config_from_dict({"name": "m", "backend": "python"})
    loaded = PythonBackend().load(ModelVersion("m", 1, Models(tmp_path).write(ARGUMENTS), config))
    instance = loaded.create_instance(InstanceDevice(kind, device_id, "m_0"))
    try:
        (result,) = instance.execute([InferRequest("m", "1", "", [], [], None)], Execution(cast(Any, None)))
    finally:
        instance.close()
        loaded.unload()
    assert result is not None
    args = json.loads(bytes(result.outputs[0].data)[4:])
    assert (args["model_instance_kind"], args["model_instance_device_id"]) == (reported, str(device_id))
    assert (args["model_name"], args["model_version"], args["model_instance_name"]) == ("m", "1", "m_0")
