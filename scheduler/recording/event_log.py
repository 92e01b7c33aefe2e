"""`EventLog`: records every event of each `ModelScheduler`, to replay incidents offline.

`weir scheduler --event-log` records; `python -m weir.scheduler.replay` replays. Tensors are not recorded, only the facts
by which a policy decides. Each queue has files of its own, and each file can be replayed without those before it,
because it begins with the policy's state. The format of the rows is in `weir.scheduler.recording.event_rows`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.recording.event_rows import EVENTS, digest_of, header, pack_event, pack_row, reusable
from weir.scheduler.recording.state_snapshot import pack_state

logger = logging.getLogger("weir.scheduler")

MAX_LOG_FILE_BYTES = 64 << 20
"""Events in one file of an event log; then the next file starts."""

KEPT_LOG_FILES = 4
"""Files kept of each queue, including those of earlier schedulers; older ones are removed."""

SUFFIX = ".events"
_BUFFER_BYTES = 1 << 18


class EventLog:
    """The event logs of one scheduler in `folder`, which is created. Raises OSError if that fails."""

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
        """Creates a policy for the queue that is recorded, with these options of `ModelScheduler`."""
        log = ModelLog(self, queue, next_batch_id, options)
        self._models = [log for log in self._models if log.is_open]
        self._models.append(log)
        return RecordedModelScheduler(queue.model, log, options)

    def close(self) -> None:
        """Writes everything to disk and stops recording."""
        for log in self._models:
            log.close()

    def next_file(self, queue: LiveQueue) -> Path:
        """Creates a file for events of the queue and removes the oldest ones beyond the limit. Raises OSError."""
        token = subjects.queue_token(*queue)
        older = sorted(self._folder.glob(f"{token}.*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for path in older[: max(0, len(older) + 1 - self._kept_files)]:
            path.unlink(missing_ok=True)
        path = self._folder / f"{token}.{subjects.token(self._id)}.{time.time_ns() // 1000}{SUFFIX}"
        path.touch(exist_ok=False)
        return path


class ModelLog:
    """The log of one queue. Batch ids are drawn from `draw`. An error ends the recording and nothing else.

    Rows are buffered and written about once a second. No file is kept open in between, since there may be thousands
    of models.
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
        """Returns the next batch id, and records it in the row."""
        batch_id = self._draw()
        self._batch_ids.append(batch_id)
        return batch_id

    def before(
        self, scheduler: ModelScheduler, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> bytes | None:
        """Call before the method. Returns the event for `after`, or None if nothing is recorded."""
        if not self.is_open:
            return None
        try:
            if self._path is None or self._size_bytes >= self._log.max_file_bytes:
                self._begin_file(scheduler)
            self._number += 1
            self._batch_ids.clear()
            return pack_event(self._number, method, arguments, keywords)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            self._stop(error)
            return None

    def after(self, event: bytes, actions: Any, is_last_of_second: bool) -> None:
        """Call after the method, which returned `actions`."""
        try:
            self._add(pack_row(event, self._batch_ids, digest_of(event, actions)))
            if is_last_of_second or len(self._unwritten) >= _BUFFER_BYTES:
                self._write()
        except (OSError, ValueError, TypeError) as error:
            self._stop(error)

    def close(self) -> None:
        """Writes the buffered rows and stops recording."""
        self.is_open = False
        try:
            self._write()
        except OSError as error:
            self._stop(error)

    def _begin_file(self, scheduler: ModelScheduler) -> None:
        self._write()
        state = pack_state(scheduler, self.draw_batch_id, without=("log",)) if self._number else None
        self._path = self._log.next_file(self._queue)
        self._size_bytes = 0
        # The header does not count: it may exceed the size limit, and each file must have room for events.
        self._unwritten += header(self._queue.model, self._options, self._number + 1, time.time_ns() // 1000, state)
        self._write()  # without its header a file can not be read, neither live nor after a kill

    def _add(self, row: bytes) -> None:
        self._unwritten += row
        self._size_bytes += len(row)

    def _write(self) -> None:
        if self._path is not None and self._unwritten:
            with self._path.open("ab") as file:
                file.write(self._unwritten)
            self._unwritten.clear()

    def _stop(self, error: Exception) -> None:
        logger.warning("queue %s: recording of its events stopped: %s", self._queue, error)
        self.is_open = False
        self._unwritten.clear()


class RecordedModelScheduler(ModelScheduler):
    """A `ModelScheduler` whose events are recorded in `log`."""

    def __init__(self, name: str, log: ModelLog, options: dict[str, int]) -> None:
        super().__init__(name, log.draw_batch_id, **options)
        self.log = log

    def recorded(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Calls a method, and records its arguments and a digest of its result."""
        arguments = tuple(map(reusable, arguments))
        event = self.log.before(self, method, arguments, keywords)
        actions = getattr(super(), method)(*arguments, **keywords)
        if event is not None:
            self.log.after(event, actions, is_last_of_second=method == "expire")
        return actions


def _recorded(method: str) -> Callable[..., Any]:
    def record(self: RecordedModelScheduler, *arguments: Any, **keywords: Any) -> Any:
        return self.recorded(method, arguments, keywords)

    return record


for _method in EVENTS:
    setattr(RecordedModelScheduler, _method, _recorded(_method))
