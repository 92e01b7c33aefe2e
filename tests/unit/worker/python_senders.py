"""Models that send responses themselves, and a sink that keeps what they send."""

from __future__ import annotations

import time
from collections.abc import Callable

from python_models import execute_body

from schemas.errors import ErrorCode, WeirError
from worker.backends.python_messages import PythonResponse
from worker.backends.python_process import PythonProcess, PythonRequest

DECOUPLED = {"model_transaction_policy": {"decoupled": True}}

TRIED = """
        def tried(call, *arguments, **options):
            try:
                call(*arguments, **options)
                return "ok"
            except (pb_utils.TritonModelException, TypeError) as error:
                return f"{type(error).__name__}: {error}".partition("\\n")[0]

        def texts(*lines):
            return pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array(lines, dtype=np.object_))])

        FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
"""


class Collected:
    """A sink that keeps everything, copied."""

    def __init__(self) -> None:
        self.responses: dict[int, list[PythonResponse | None]] = {}
        self.over: list[int] = []
        self.failures: list[WeirError] = []
        self.cancelled: set[int] = set()

    def respond(self, position: int, response: PythonResponse | None, is_final: bool) -> None:
        assert position not in self.over
        for tensor in () if response is None else response.outputs:
            assert not isinstance(tensor.data, tuple)
            tensor.data = bytes(tensor.data)
        self.responses.setdefault(position, []).append(response)
        if is_final:
            self.over.append(position)

    def is_cancelled(self, position: int) -> bool:
        return position in self.cancelled

    def fail(self, error: WeirError) -> None:
        self.failures.append(error)

    def texts(self, position: int = 0) -> list[str]:
        """Each response as its first text, "-" for the end alone."""
        return [
            "-" if response is None else response.outputs[0].to_numpy()[0].decode()
            for response in self.responses.get(position, [])
        ]


def said(error: WeirError | None) -> tuple[ErrorCode, str]:
    assert error is not None
    return error.code, error.message


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


def body(text: str) -> str:
    """A model with `tried`, `texts` and `FINAL` in scope of its `execute`."""
    source = execute_body(text)
    head, _, rest = source.partition("    def execute(self, requests):\n")
    return f"{head}    def execute(self, requests):\n{TRIED}{rest}"


def run(process: PythonProcess, *ids: str) -> tuple[list[PythonResponse | None], Collected]:
    """What `execute` returned for requests of these ids, and what was sent."""
    sink = Collected()
    return process.execute([PythonRequest(id) for id in ids or ("",)], sink), sink
