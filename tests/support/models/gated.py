"""Models whose only instance can be kept busy, and clients that call them meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.clients.stock import grpc_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until


def write_gated_model(root: Path, name: str, batching: str, max_batch_size: int = 1, more: str = "") -> Path:
    """A model of one instance with this `dynamic_batching`; None for none."""
    return write_python_model(
        root,
        name,
        "gated",
        {"VALUE": ("INT64", [1])},
        {name: ("INT64", [1]) for name in ("TURN", "BATCH", "CANCELLED")},
        max_batch_size,
        f"dynamic_batching {{ {batching} }} instance_group [{{ count: 1 kind: KIND_CPU }}] {more}",
    )


class Asked:
    """A call that was sent: its outcome, and how long it took."""

    def __init__(self, client: Any, model: str, value: int, rows: int, options: dict[str, Any]) -> None:
        self.result: Any = None
        self.error: Any = None
        self.took_s = 0.0
        self._began_s = time.monotonic()
        inputs = grpc_inputs({"VALUE": np.full((rows, 1), value, np.int64)})
        self._call = client.async_infer(model, inputs, callback=self._answered, **options)

    def _answered(self, result: Any, error: Any) -> None:
        self.took_s = time.monotonic() - self._began_s
        self.result, self.error = result, error

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.error is not None

    def output(self, name: str) -> int:
        wait_until(lambda: self.is_over)
        assert self.error is None, self.error
        return int(self.result.as_numpy(name).flat[0])

    @property
    def refusal(self) -> tuple[str, str]:
        wait_until(lambda: self.is_over)
        assert self.error is not None
        return self.error.status().removeprefix("StatusCode."), self.error.message()

    def cancel(self) -> None:
        self._call.cancel()


class Gate:
    """A model while its instance is busy."""

    def __init__(self, server: Server, client: Any, folder: Path) -> None:
        self.server = server
        self._client = client
        self._folder = folder
        self._busy: Asked | None = None
        self._asked: list[Asked] = []

    def close(self) -> None:
        """Keeps the instance busy from now on."""
        self._busy = Asked(self._client, self._folder.name, 0, 1, {})
        wait_until((self._folder / "running").exists)

    def ask(self, value: int = 1, rows: int = 1, **options: Any) -> Asked:
        """Sends a call; calls reach the queue in the order in which they are sent."""
        self._asked.append(Asked(self._client, self._folder.name, value, rows, options))
        return self._asked[-1]

    def wait_queued(self) -> None:
        """Returns when all calls that wait are in the queue."""
        name = "nv_inference_pending_request_count"
        waiting = [asked for asked in self._asked if not asked.is_over]
        wait_until(lambda: self.server.metrics()[name, self._folder.name] == len([a for a in waiting if not a.is_over]))

    def open(self) -> None:
        """The instance is free again."""
        assert self._busy is not None
        (self._folder / "go").touch()
        self._busy.output("TURN")


@contextmanager
def gate(server: Server, client: Any, model: str) -> Iterator[Gate]:
    """The model with its instance busy; in the end every call has had its answer."""
    gate = Gate(server, client, server.folder / "models" / model)
    gate.close()
    yield gate
    wait_until(lambda: all(asked.is_over for asked in gate._asked))
