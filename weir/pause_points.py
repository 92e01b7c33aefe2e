"""Pause points: named steps in a request's life at which a test has a role stop, or die.

They are no lines in the code of roles: where the environment names a folder (`WEIR_PAUSE_POINTS`), the functions that are
those steps are replaced when the role starts; without it nothing of this module is even imported, and no request pays.
A role then takes orders on the datagram socket `<folder>/<process id>`, one a message: `point action passages delay_ms`,
where `action` is `kill` (SIGKILL), `stop` (SIGSTOP) or `tell`, done at the last of so many passages, so long after it;
`none` takes an order back. Before it acts, it tells `<folder>/driver` in one message: `role process-id point`.
With action `raise`, `point` is the name of a contained site (`runtime.containment.SITES`), which then raises
`InjectedFailure` once, in the role that has it; with 0 passages the order is taken back.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from runtime.containment import SITES, Site

VARIABLE = "WEIR_PAUSE_POINTS"
"""Names the folder; unset, there are no pause points."""

logger = logging.getLogger("weir.pause_points")


class Point(NamedTuple):
    """A step of a role: the function (`module:Class.name`), and whether the step is before or after it."""

    role: str
    function: str
    is_after: bool = False


POINTS = {
    # A live request, from its door to its door.
    "accepted": Point("gateway", "calls.inference:Inference._accept", is_after=True),
    "published": Point("gateway", "calls.outbox:Outbox._on_publish_ack", is_after=True),
    "pulled": Point("scheduler", "scheduler.service:SchedulerService._on_frame"),
    "batched": Point("scheduler", "scheduler.service:SchedulerService._send"),
    "received": Point("worker", "worker.service:WorkerService._on_batch"),
    "executing": Point("worker", "worker.model_run:ModelRun.begin"),
    "executed": Point("worker", "worker.model_run:ModelRun.begin", is_after=True),
    "answered": Point("worker", "worker.service:WorkerService.finished"),
    "acked": Point("worker", "worker.service:WorkerService.finished", is_after=True),
    "ended": Point("scheduler", "scheduler.service:SchedulerService._on_done"),
    "delivered": Point("gateway", "calls.delivery:Delivery._give"),
    # What a durable request has besides.
    "durable.pulled": Point("gateway", "gateway.durable.lane_intake:LaneIntake._arrived", is_after=True),
    "durable.submitted": Point("gateway", "gateway.durable.runner:Runner.begin", is_after=True),
    "durable.answered": Point("gateway", "gateway.durable.runner:Runner._on_answer"),
    "durable.recorded": Point("gateway", "gateway.durable.recorder:Recorder._on_stored"),
    "durable.replied": Point("gateway", "gateway.durable.acknowledger:Acknowledger._flush"),
    "durable.purged": Point("gateway", "gateway.durable.acknowledger:Acknowledger._purged", is_after=True),
}
"""`answered` lies between the answers of a batch and what follows them: its end, and acknowledgements. `delivered` is just
before the caller is told; `published` and `durable.recorded` are when the stream has said that it has the message.
"""


class InjectedFailure(Exception):
    """Raised at a contained site on order of a test."""


class _Order:
    def __init__(self, action: str, passages: int, delay_s: float) -> None:
        self.action = action
        self.left = passages
        self.delay_s = delay_s


class _Armed:
    """The orders of this process, and what it does at a point."""

    def __init__(self, role: str, folder: Path) -> None:
        self._role = role
        self._driver = str(folder / "driver")
        self._orders: dict[str, _Order] = {}
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / str(os.getpid())))
        threading.Thread(target=self._listen, name="pause points", daemon=True).start()

    def _listen(self) -> None:
        while True:
            point, action, passages, delay_ms = self._socket.recv(200).decode().split()
            if action == "raise":
                if point in SITES:
                    self._raise_once(SITES[point], int(passages))
                continue
            with self._lock:
                self._orders.clear()
                if action != "none":
                    self._orders[point] = _Order(action, int(passages), float(delay_ms) / 1000)

    def _raise_once(self, site: Site, passages: int) -> None:
        """Has the site raise at the last of so many passages, or never with 0 of them."""
        site.function = function = getattr(site.function, "injected_into", site.function)
        left = [None] * passages
        if not left:
            return

        @wraps(function)
        def raising(*arguments: Any, **named: Any) -> Any:
            try:
                left.pop()
            except IndexError:  # another thread was first
                return function(*arguments, **named)
            if left:
                return function(*arguments, **named)
            site.function = function
            self._socket.sendto(f"{self._role} {os.getpid()} {site.name}".encode(), self._driver)
            raise InjectedFailure(site.name)

        raising.injected_into = function  # type: ignore[attr-defined]
        site.function = raising

    def passed(self, point: str) -> None:
        """Does what was ordered for a point that this process has come to."""
        if point not in self._orders:
            return
        with self._lock:
            order = self._orders.get(point)
            if order is None:
                return
            order.left -= 1
            if order.left > 0:
                return
            del self._orders[point]
        if order.delay_s:
            threading.Thread(target=self._act, args=(point, order), daemon=True).start()
        else:
            self._act(point, order)

    def _act(self, point: str, order: _Order) -> None:
        time.sleep(order.delay_s)
        try:
            self._socket.sendto(f"{self._role} {os.getpid()} {point}".encode(), self._driver)
        except OSError as error:
            logger.warning("nobody is told of pause point %s: %s", point, error)
        if order.action != "tell":
            os.kill(os.getpid(), signal.SIGKILL if order.action == "kill" else signal.SIGSTOP)


def arm(role: str) -> None:
    """Makes the pause points of this role, where the environment asks for them. Called before the role is made."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    logger.warning("pause points are armed: this process stops, or dies, when it is told so in %s", folder)
    armed = _Armed(role, Path(folder))
    for name, point in POINTS.items():
        if point.role == role:
            owner, attribute, function = found(point)
            if name == "answered":
                replacement = _between_answers_and_end(function, armed)
            else:
                replacement = _around(function, name, point.is_after, armed)
            setattr(owner, attribute, replacement)


def found(point: Point) -> tuple[Any, str, Callable[..., Any]]:
    """The class that has the function of this point, its name there, and itself."""
    module, _, path = point.function.partition(":")
    class_name, _, attribute = path.partition(".")
    owner = getattr(import_module(module), class_name)
    return owner, attribute, getattr(owner, attribute)


def _around(function: Callable[..., Any], name: str, is_after: bool, armed: _Armed) -> Callable[..., Any]:
    @wraps(function)
    def passing(*arguments: Any, **named: Any) -> Any:
        if not is_after:
            armed.passed(name)
        outcome = function(*arguments, **named)
        if is_after:
            armed.passed(name)
        return outcome

    return passing


def _between_answers_and_end(finished: Callable[..., Any], armed: _Armed) -> Callable[..., Any]:
    """`WorkerService.finished` in two writes, as one is where the worker dies while the kernel takes it."""

    @wraps(finished)
    def passing(service: Any, batch: Any) -> Any:
        if batch.done is None or batch.done.batch_id < 0 or not batch.answers:
            return finished(service, batch)
        finished(service, batch._replace(done=None, acks=()))
        armed.passed("answered")
        return finished(service, batch._replace(answers=[], first=()))

    return passing
