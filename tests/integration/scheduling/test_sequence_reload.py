"""A reload during sequences: each ends with an error that names it, and none continues with another's state."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers.weir_server import Server

SEQUENCES = """
sequence_batching { direct { } max_sequence_idle_microseconds: 60000000 control_input [
  { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
  { name: "END" control [{ kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] }] },
  { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] }] },
  { name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] }
] }
instance_group [{ count: 2 kind: KIND_CPU }]
"""
RELOADS = 2


def test_state_is_never_mixed_up(tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    write_python_model(
        models,
        "sums",
        "accumulate",
        {"INPUT": ("INT32", [1])},
        {"OUTPUT": ("INT32", [1]), "INSTANCE": ("BYTES", [1])},
        4,
        SEQUENCES,
    )
    server = Server(tmp_path, models, "--model-control-mode=explicit", "--load-model=sums")
    over = threading.Event()

    def client_of(sequence: int) -> tuple[int, int]:
        sums = lost = step = expected = 0
        with server.http() as client:
            while not over.is_set() or step:
                start, end = step == 0, step >= 20 and over.is_set()
                value = sequence * 1000 + step
                try:
                    result = client.infer(
                        "sums",
                        http_inputs({"INPUT": np.array([[value]], np.int32)}),
                        sequence_id=sequence,
                        sequence_start=start,
                        sequence_end=end,
                    )
                except InferenceServerException as error:
                    if "was lost with its instance" not in error.message():
                        raise
                    lost += 1
                    step = expected = 0
                    continue
                expected = value if start else expected + value
                assert int(result.as_numpy("OUTPUT")[0, 0]) == expected
                sums += 1
                step = 0 if end else step + 1
        return sums, lost

    try:
        with ThreadPoolExecutor(6) as pool, server.http() as control:
            clients = [pool.submit(client_of, number) for number in range(1, 7)]
            code = models / "sums" / "1" / "model.py"
            try:
                for number in range(RELOADS):
                    code.write_text(f"{code.read_text()}\n# {number}\n")
                    control.load_model("sums")
            finally:
                over.set()
            outcomes = [client.result(60) for client in clients]
        assert all(sums for sums, _ in outcomes)
        assert sum(lost for _, lost in outcomes) >= RELOADS
        assert server.stop() == 0
    finally:
        server.close()
