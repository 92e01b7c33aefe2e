"""`ResponseWriter`: encodes the results of one instance as responses, with large outputs in shared memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from weir.bus.naming.identity import shares_memory
from weir.bus.payloads.arena import INLINE_LIMIT_BYTES, LeasedSlots, PayloadArena
from weir.bus.payloads.reach import process_reach
from weir.runtime.containment import contained, report
from weir.schemas.core.errors import WeirError, internal, unavailable
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.batches import NO_REPLY, BatchEntry
from weir.schemas.wire.calls import ResponseRun, Timestamps, pack_error, pack_response, pack_responses
from weir.worker.backend_api.interface import DeviceLost, Result
from weir.worker.execution.batch_tensors import Reshaper
from weir.worker.execution.shared_memory import SharedMemoryIO

READERS_TIMEOUT_S = 2.0
"""How long the outputs of an instance that is unloaded stay readable."""


def pack_by_gateway(version: int, rows: Mapping[str, Sequence[tuple[Any, ...]]]) -> list[tuple[str, bytes]]:
    """The messages with the rows of each gateway: one, or several where one would be larger than the broker takes."""
    messages: list[tuple[str, bytes]] = []
    for gateway, of in rows.items():
        message = pack_rows(version, of)
        if len(message) <= process_reach().message_bytes or len(of) == 1:
            messages.append((gateway, message))
        else:
            middle = len(of) // 2
            messages += pack_by_gateway(version, {gateway: of[:middle]})
            messages += pack_by_gateway(version, {gateway: of[middle:]})
    return messages


def pack_rows(version: int, rows: Sequence[tuple[Any, ...]]) -> bytes:
    """As `pack_responses`, but a row that can't be encoded becomes an error of its own request."""
    try:
        return pack_responses(version, rows)
    except Exception as error:  # noqa: BLE001 - what a model made may be anything; its other requests are answered
        report("weir.worker.execution.response_writer: packing the responses of a batch", error)
        return pack_responses(version, [_packable(version, row) for row in rows])


def _packable(version: int, row: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        pack_responses(version, [row])
        return row
    except Exception as error:  # noqa: BLE001 - reported above
        # The columns after the first three do not come from the model: finality, timestamps, run.
        return (*pack_error(row[0], packing_failed(error)), *row[3:])


def packing_failed(error: Exception) -> WeirError:
    """The error of a request whose response can't be encoded."""
    return internal(f"the response can't be sent: {type(error).__name__}: {error}")


class Ending(NamedTuple):
    """What a response has besides its result (see `weir.schemas.wire.calls.ResponseEnvelope`)."""

    is_final: bool = True
    timestamps: Timestamps | None = None
    run: ResponseRun | None = None


LAST = Ending()


class ResponseWriter:
    """Encodes the responses of one instance; thread-safe.

    Large outputs are copied into payload slots of the arena `arena_name`. A slot is leased to the gateway until the gateway
    releases it. `shared_memory` writes outputs to the memory of clients. `reshaper` is None for a model that needs none.
    """

    def __init__(self, arena_name: str, shared_memory: SharedMemoryIO, reshaper: Reshaper | None = None) -> None:
        self._shared_memory = shared_memory
        self._reshaper = reshaper
        self._arena = PayloadArena(arena_name)
        self._leases = LeasedSlots()
        self._is_closed = False
        self._lock = threading.Condition()  # guards the arena and the leases; notified when a slot is released

    @contained(on_error="_writing_failed", passes=(DeviceLost,))
    def write(
        self,
        entry: BatchEntry,
        request: InferRequest | None,
        result: Result,
        ending: Ending = LAST,
    ) -> tuple[Any, ...]:
        """The row of a responses message for the entry's result (see `weir.schemas.wire.calls.ResponseEnvelope`).

        Outputs get the shapes that clients see. Those that go to a client's memory, and large ones, are copied now, the
        others when the message is packed. `request` is None if it did not run. `result.error` is set where that fails.
        """
        if request is not None:
            if self._reshaper is not None:
                self._reshaper.to_client(result)
            for output in request.outputs:
                if output.region is not None and entry.gateway != NO_REPLY:
                    self._shared_memory.deliver(request, result)
                    break
        error = result.error or self.place(entry.gateway, result.outputs)
        if error is not None:
            return pack_error(entry.key, error, *ending)
        return pack_response(entry.key, result.outputs, result.parameters, *ending)

    def _writing_failed(
        self,
        error: Exception,
        entry: BatchEntry,
        _request: InferRequest | None,
        result: Result,
        ending: Ending = LAST,
    ) -> tuple[Any, ...]:
        result.error = packing_failed(error)
        return pack_error(entry.key, result.error, *ending)

    def place(self, gateway: str, outputs: Iterable[Tensor]) -> WeirError | None:
        """Copies outputs that are large for `gateway` into slots; returns an error if the others do not fit into a message.

        Outputs that are references already are not copied.
        """
        inline_bytes = 0
        for tensor in outputs:
            data = tensor.data
            size = data.size if isinstance(data, tuple) else len(data)
            # Most outputs are small for every gateway: then its host need not be looked up.
            if size > INLINE_LIMIT_BYTES and self._is_large_for(gateway, size) and self._lend(tensor):
                continue
            inline_bytes += size
        reach = process_reach()
        if inline_bytes > reach.message_bytes:
            why = "" if reach.includes(gateway) else ", which is on another host: its worker has no --payload-listen"
            return unavailable(f"the response of {inline_bytes} bytes is larger than can be sent to the gateway{why}")
        return None

    def release(self, segment: str, slot: int, generation: int) -> None:
        """Releases a slot whose output the gateway has read."""
        with self._lock:
            self._leases.give_back(segment, slot, generation)
            self._lock.notify_all()

    @property
    def slots_held(self) -> int:
        """The number of slots with outputs that no gateway has released yet."""
        return len(self._leases)

    def close(self, wait_for_readers: bool = False) -> None:
        """Removes the arena; with `wait_for_readers` after all slots were released, or after a while.

        Outputs that have not been read by then are lost. Later outputs travel inside messages.
        """
        with self._lock:
            if wait_for_readers:
                self._lock.wait_for(lambda: not self._leases, READERS_TIMEOUT_S)
            self._is_closed = True
            self._arena.close()

    def _is_large_for(self, gateway: str, size_bytes: int) -> bool:
        reach = process_reach()
        return size_bytes > reach.inline_limit_bytes(is_shared=False) or shares_memory(gateway)

    def _lend(self, tensor: Tensor) -> bool:
        if isinstance(tensor.data, PayloadRef):
            return True
        with self._lock:
            if self._is_closed:
                return False
            self._leases.expire()
            slot = self._arena.allocate(tensor.size_bytes)
            if slot is None:
                return False
            slot.view[:] = tensor.data  # type: ignore[assignment]
            tensor.data = self._leases.lend(slot)
        return True
