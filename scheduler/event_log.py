"""`EventLog`: writes what is fed to each `ModelScheduler`, so that what happened can be replayed at a desk.

`weir scheduler --event-log` records; `python -m scheduler.replay` replays. Tensors are not recorded, only the facts by
which a policy decides. Each queue of a model has files of its own, and each of them can be replayed without those before
it: it begins with the scheduler's state. Rows: `scheduler.event_rows`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bus import subjects
from bus.live_queues import LiveQueue
from scheduler.event_rows import EVENTS, digest_of, header, kept, pack_event, pack_row
from scheduler.model_scheduler import ModelScheduler
from scheduler.state_snapshot import pack_state

logger = logging.getLogger("weir.scheduler")

MAX_LOG_FILE_BYTES = 64 << 20
"""Events in one file of an event log; then the next is begun."""

KEPT_LOG_FILES = 4
"""Files kept of each queue, also of schedulers that were here before; older ones are removed."""

SUFFIX = ".events"
_BUFFER_BYTES = 1 << 18


class EventLog:
    """The event logs of one scheduler, in `folder`, which is made. Raises OSError where that can't be."""

    def __init__(
        self,
        folder: Path,
        scheduler_id: str,
        max_file_bytes: int = MAX_LOG_FILE_BYTES,
        kept_files: int = KEPT_LOG_FILES,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._id = scheduler_id
        self._kept_files = kept_files
        self._models: list[ModelLog] = []
        self.max_file_bytes = max_file_bytes

    def model(self, queue: LiveQueue, next_batch_id: Callable[[], int], **options: int) -> RecordedModelScheduler:
        """A new scheduler for the queue, which is recorded; with these options of `ModelScheduler`."""
        log = ModelLog(self, queue, next_batch_id, options)
        self._models = [log for log in self._models if log.is_open]
        self._models.append(log)
        return RecordedModelScheduler(queue.model, log, options)

    def close(self) -> None:
        """Nothing is recorded any more; what was is on disk."""
        for log in self._models:
            log.close()

    def next_file(self, queue: LiveQueue) -> Path:
        """A new file for events of the queue; the oldest ones, which would be too many, are gone. Raises OSError."""
        token = subjects.queue_token(*queue)
        older = sorted(self._folder.glob(f"{token}.*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for path in older[: max(0, len(older) + 1 - self._kept_files)]:
            path.unlink(missing_ok=True)
        path = self._folder / f"{token}.{subjects.token(self._id)}.{time.time_ns() // 1000}{SUFFIX}"
        path.touch(exist_ok=False)
        return path


class ModelLog:
    """The log of one queue, which draws batch ids from `draw`. What fails ends the record, and nothing else.

    Rows are gathered, and written about once a second. No file is held open in between: there may be thousands of models.
    """

    def __init__(self, log: EventLog, queue: LiveQueue, draw: Callable[[], int], options: dict[str, int]) -> None:
        self._log = log
        self._queue = queue
        self._options = options
        self._draw = draw
        self._batch_ids: list[int] = []  # drawn since the last row
        self._number = 0
        self._path: Path | None = None
        self._size_bytes = 0
        self._unwritten = bytearray()
        self.is_open = True

    def draw_batch_id(self) -> int:
        """The next batch id, which the row tells."""
        batch_id = self._draw()
        self._batch_ids.append(batch_id)
        return batch_id

    def before(
        self, scheduler: ModelScheduler, method: str, arguments: tuple[Any, ...], by_name: dict[str, Any]
    ) -> bytes | None:
        """The method is about to be called; returns the event, for `after`, or None where it is not recorded."""
        if not self.is_open:
            return None
        try:
            if self._path is None or self._size_bytes >= self._log.max_file_bytes:
                self._begin_file(scheduler)
            self._number += 1
            self._batch_ids.clear()
            return pack_event(self._number, method, arguments, by_name)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            self._give_up(error)
            return None

    def after(self, event: bytes, actions: Any, is_last_of_second: bool) -> None:
        """The event has had these actions."""
        try:
            self._add(pack_row(event, self._batch_ids, digest_of(event, actions)))
            if is_last_of_second or len(self._unwritten) >= _BUFFER_BYTES:
                self._write()
        except (OSError, ValueError, TypeError) as error:
            self._give_up(error)

    def close(self) -> None:
        """Writes what is not on disk yet, and records nothing from now on."""
        self.is_open = False
        try:
            self._write()
        except OSError as error:
            self._give_up(error)

    def _begin_file(self, scheduler: ModelScheduler) -> None:
        self._write()
        state = pack_state(scheduler, self.draw_batch_id, without=("log",)) if self._number else None
        self._path = self._log.next_file(self._queue)
        self._size_bytes = 0
        # The head does not count: it may be larger than a file should be, and each file must have room for events.
        self._unwritten += header(self._queue.model, self._options, self._number + 1, time.time_ns() // 1000, state)
        self._write()  # a file without its head can't be read, neither live nor after a kill

    def _add(self, row: bytes) -> None:
        self._unwritten += row
        self._size_bytes += len(row)

    def _write(self) -> None:
        if self._path is not None and self._unwritten:
            with self._path.open("ab") as file:
                file.write(self._unwritten)
            self._unwritten.clear()

    def _give_up(self, error: Exception) -> None:
        logger.warning("model %s: its events are not recorded any more: %s", self._queue, error)
        self.is_open = False
        self._unwritten.clear()


class RecordedModelScheduler(ModelScheduler):
    """A `ModelScheduler` whose events are recorded in `log`."""

    def __init__(self, name: str, log: ModelLog, options: dict[str, int]) -> None:
        super().__init__(name, log.draw_batch_id, **options)
        self.log = log

    def recorded(self, method: str, arguments: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
        """What the method decides, which is recorded together with what it was given."""
        arguments = tuple(map(kept, arguments))
        event = self.log.before(self, method, arguments, by_name)
        actions = getattr(super(), method)(*arguments, **by_name)
        if event is not None:
            self.log.after(event, actions, is_last_of_second=method == "expire")
        return actions


def _recorded(method: str) -> Callable[..., Any]:
    def record(self: RecordedModelScheduler, *arguments: Any, **by_name: Any) -> Any:
        return self.recorded(method, arguments, by_name)

    return record


for _method in EVENTS:
    setattr(RecordedModelScheduler, _method, _recorded(_method))
