"""`AnswerPacker`: makes answers of results, with large outputs in payload slots lent to the gateway."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from bus.identity import shares_memory
from bus.payloads import INLINE_LIMIT_BYTES, REMOTE_INLINE_LIMIT_BYTES, LeasedSlots, PayloadArena
from runtime.containment import contained, report
from schemas.errors import WeirError, internal, unavailable
from schemas.messages import Moments, Run, pack_answer, pack_answers, pack_error
from schemas.tensors import PayloadRef, Tensor
from worker.backend import Result

MAX_INLINE_ANSWER_BYTES = 4 << 20
"""Outputs of one answer that may travel inside a message, when there is no room in shared memory."""

READERS_PATIENCE_S = 2.0
"""How long the outputs of an instance that is unloaded stay readable."""


def pack_rows(version: int, rows: Sequence[tuple[Any, ...]]) -> bytes:
    """As `pack_answers`, but a row that can't be packed becomes an error of its own request; the others stay."""
    try:
        return pack_answers(version, rows)
    except Exception as error:  # noqa: BLE001 - what a model made may be anything; its other requests are answered
        report("worker.answer_packer: packing the answers of a batch", error)
        return pack_answers(version, [_packable(version, row) for row in rows])


def _packable(version: int, row: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        pack_answers(version, [row])
        return row
    except Exception as error:  # noqa: BLE001 - reported above
        # What stands behind the first three is no model's: whether it is the last, when it passed where, its run.
        return (*pack_error(row[0], packing_failed(error)), *row[3:])


def packing_failed(error: Exception) -> WeirError:
    """What a request fails with whose response can't be made into a message."""
    return internal(f"the response can't be sent: {type(error).__name__}: {error}")


class AnswerPacker:
    """The answers of one instance; for any thread."""

    def __init__(self, arena_name: str) -> None:
        self._arena = PayloadArena(arena_name)
        self._leases = LeasedSlots()
        self._is_closed = False
        self._lock = threading.Condition()  # of the two above; told when a slot is given back

    @contained(on_error="_packing_failed")
    def packed(
        self,
        gateway: str,
        key: int,
        result: Result,
        is_final: bool = True,
        moments: Moments | None = None,
        run: Run | None = None,
    ) -> tuple[Any, ...]:
        """The row of an answers message for this result (see `schemas.messages.Answer`).

        Large outputs are copied now, the others when the message is packed.
        """
        error = self.place(gateway, result.outputs) if result.error is None else result.error
        if error is not None:
            return pack_error(key, error, is_final, moments, run)
        return pack_answer(key, result.outputs, result.parameters, is_final, moments, run)

    def _packing_failed(
        self,
        error: Exception,
        _gateway: str,
        key: int,
        _result: Result,
        is_final: bool = True,
        moments: Moments | None = None,
        run: Run | None = None,
    ) -> tuple[Any, ...]:
        return pack_error(key, packing_failed(error), is_final, moments, run)

    def place(self, gateway: str, outputs: Iterable[Tensor]) -> WeirError | None:
        """Puts what is large for `gateway` into slots; an error when the others are too large together for a message.

        An output that is a reference stays one.
        """
        inline_bytes = 0
        for tensor in outputs:
            size = tensor.size_bytes
            # Most outputs are small for anybody, and then nobody asks where the gateway is.
            if size > INLINE_LIMIT_BYTES and self._is_large_for(gateway, size) and self._lend(tensor):
                continue
            inline_bytes += size
        if inline_bytes > MAX_INLINE_ANSWER_BYTES:
            return unavailable(f"the response of {inline_bytes} bytes is larger than can be sent to the gateway")
        return None

    def give_back(self, segment: str, slot: int, generation: int) -> None:
        """A gateway has read an output that lay in shared memory."""
        with self._lock:
            self._leases.give_back(segment, slot, generation)
            self._lock.notify_all()

    @property
    def slots_held(self) -> int:
        """Payload slots that hold outputs which no gateway has given back yet."""
        return len(self._leases)

    def close(self, wait_for_readers: bool = False) -> None:
        """Gives up the memory, with `wait_for_readers` when every output has been read, or could have been.

        What has not been read by then is lost, and nothing is placed any more.
        """
        with self._lock:
            if wait_for_readers:
                self._lock.wait_for(lambda: not self._leases, READERS_PATIENCE_S)
            self._is_closed = True
            self._arena.close()

    def _is_large_for(self, gateway: str, size_bytes: int) -> bool:
        return size_bytes > REMOTE_INLINE_LIMIT_BYTES or shares_memory(gateway)

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
