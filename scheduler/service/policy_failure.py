"""`log_policy_failure`: logs which event made a policy raise, the queue before it, and the traceback.

All of it is found after the exception, so events that do not raise cost nothing. The event is read from the traceback;
`ModelScheduler.summary` describes how its text may differ from the queue before the event.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Container
from itertools import dropwhile
from reprlib import Repr
from traceback import walk_tb
from types import FrameType
from typing import Any

from weir.runtime.log_limiter import LogLimiter
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.placement.instances import Instance
from weir.scheduler.service.owned_queue import OwnedQueue
from weir.schemas.wire.batches import BatchCompletion

logger = logging.getLogger("weir.scheduler")

_limited = LogLimiter(logger)

MAX_EVENT_LENGTH = 16 << 10
"""Characters of an event in the log."""

_MAX_ITEMS = 100
_MAX_CALLS = 10


class _Arguments(Repr):
    """The text of arguments: numbers, texts, completions, names of requests, batches and instances; else the type.

    So neither bodies nor tensors get into the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxstring = _MAX_ITEMS

    def repr_instance(self, x: Any, level: int) -> str:
        """Returns the text of what is no plain number, text or container."""
        if x is None or isinstance(x, int | float | QueuedRequest | Batch | Instance | BatchCompletion):
            return repr(x)
        if isinstance(x, tuple):
            return type(x).__name__ + self.repr_tuple(x, level)
        return f"<{type(x).__name__}>"


_arguments = _Arguments()


def log_policy_failure(
    error: Exception, owned: OwnedQueue, service: object, sent: Container[object], waiting: int
) -> None:
    """Logs that the policy of a queue raised `error` and that its `waiting` requests end with an error.

    `sent` are the batches in flight, as `service` knows them. A defect may hit the queues of a thousand models at once, so
    the event, the queue and the traceback are logged for one queue a second and type of exception.
    """
    fate = "queue %s: its policy raised an exception and is recreated; %d waiting requests end with an error"
    is_logged = _limited.log(
        logging.ERROR,
        type(error).__name__,
        fate + "; event: %s; the queue before it: %s",
        owned.queue,
        waiting,
        _event(error, owned.scheduler, service),
        owned.scheduler.summary(sent),
        exc_info=error,
    )
    if not is_logged:
        logger.error(fate, owned.queue, waiting)


def _event(error: BaseException, policy: object, service: object) -> str:
    """Returns the call of the policy's method that raised `error`, and the calls in it: `method(argument=…) > …`.

    If no method of `policy` did, it is the call of `service`. The arguments are as they were when the error was raised.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for owner in (policy, service):
        calls = list(dropwhile(lambda frame: not _is_step(frame, owner), frames))  # noqa: B023
        if calls:
            return " > ".join(map(_call, calls[:_MAX_CALLS]))[:MAX_EVENT_LENGTH]
    return "unknown"


def _is_step(frame: FrameType, owner: object) -> bool:
    return frame.f_locals.get("self") is owner and frame.f_code.co_name != "_in_queue"


def _call(frame: FrameType) -> str:
    names, variable, _, values = inspect.getargvalues(frame)
    names = [name for name in (*names, variable) if name and name != "self"]
    arguments = ", ".join(f"{name}={_arguments.repr(values[name])}" for name in names if name in values)
    return f"{frame.f_code.co_qualname}({arguments})"
