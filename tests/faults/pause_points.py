"""Pause points: named steps of a request at which a test stops or kills a role.

The product has no code for them. `python -P -m tests.faults.pause_points worker …` runs `weir worker …` after replacing the
functions that are the steps of that role; `install` does the same for roles that are forked from this process. Both need
the environment variable `WEIR_PAUSE_POINTS`, which names a folder.

A role receives orders on the datagram socket `<folder>/<process id>`, one per message: `point action passages delay_ms`.
`action` is `kill` (SIGKILL), `stop` (SIGSTOP) or `tell`; it happens `delay_ms` after the role has passed the point that
many times. `none` cancels an order. Before it acts, the role reports `role process-id point` to `<folder>/driver`.
`cut` shuts down the links of the role, `halve` ends the next of them that is written to in the midst of a frame, and `fill`
sends on all of them within the host at once, whatever the point, until a peer that does not read blocks them.
With action `raise`, `point` is the name of a contained site (`weir.runtime.containment.SITES`), which then raises
`InjectedFailure` once, in the role that has it; with 0 passages the order is cancelled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from weir.bus.links import folder as link_folder
from weir.bus.links import handshake as link_handshake
from weir.bus.links.link import Link, Sent
from weir.bus.links.tcp_link import TcpLink
from weir.commands import roles
from weir.runtime.containment import SITES, Site

VARIABLE = "WEIR_PAUSE_POINTS"
"""Names the folder of the sockets. Without it no function is replaced."""

LINK_FORM_VARIABLE = "WEIR_LINK_FORM_OF_TESTS"
"""The version of the frames of links that a role uses, if it is set."""

logger = logging.getLogger("weir.pause_points")


class PausePoint(NamedTuple):
    """A step of a role: a function (`module:Class.name`), and whether the step is before or after its call."""

    role: str
    function: str
    is_after: bool = False


POINTS = {
    # A live request, from the frontend to the response.
    "accepted": PausePoint("gateway", "weir.calls.dispatch:RequestDispatcher._accept", is_after=True),
    "published": PausePoint("gateway", "weir.calls.outbox:Outbox._on_publish_ack", is_after=True),
    "pulled": PausePoint("scheduler", "weir.scheduler.service.served_queues:ServedQueues._on_frame"),
    "batched": PausePoint("scheduler", "weir.scheduler.service.served_queues:ServedQueues._send"),
    "received": PausePoint("worker", "weir.worker.batch_dispatch:BatchDispatcher._on_batches"),
    "executing": PausePoint("worker", "weir.worker.execution.invocation:ModelInvoker.start"),
    "executed": PausePoint("worker", "weir.worker.execution.invocation:ModelInvoker.start", is_after=True),
    "answered": PausePoint("worker", "weir.worker.batch_dispatch:BatchDispatcher.publish"),
    "acked": PausePoint("worker", "weir.worker.batch_dispatch:BatchDispatcher.publish", is_after=True),
    "ended": PausePoint("scheduler", "weir.scheduler.service.served_queues:ServedQueues._on_done"),
    "delivered": PausePoint("gateway", "weir.calls.responses.delivery:ResponseDispatcher.deliver"),
    # Additional steps of a durable request.
    "durable.pulled": PausePoint(
        "gateway", "weir.durable.consumer.lane_consumer:LaneConsumer._on_message", is_after=True
    ),
    "durable.submitted": PausePoint("gateway", "weir.durable.consumer.runner:RequestRunner.begin", is_after=True),
    "durable.answered": PausePoint("gateway", "weir.durable.consumer.runner:RequestRunner.respond"),
    "durable.recorded": PausePoint("gateway", "weir.durable.records.recorder:Recorder._on_stored"),
    "durable.replied": PausePoint("gateway", "weir.durable.consumer.acknowledger:Acknowledger._flush"),
    "durable.purged": PausePoint("gateway", "weir.durable.consumer.acknowledger:Acknowledger._purged", is_after=True),
}
"""`answered` is between the responses of a batch and what follows them: its completion, and acknowledgements. `delivered`
is just before the response reaches the caller; `published` and `durable.recorded` are when the stream has acknowledged the
message.
"""


class InjectedFailure(Exception):
    """Raised at a contained site by order of a test."""


LINK_ACTIONS = ("cut", "halve", "fill")
"""What is done to the links of a role."""


_PADDING = "reply.nobody", bytes(1 << 16)
"""A message that no process takes."""

_MOST_PADDING = 64


class OwnLinks:
    """The links of this process from now on, to others on its host and on other hosts, and what an order does to them."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Link | TcpLink] = weakref.WeakSet()
        self._halving = threading.Event()
        for kind in (Link, TcpLink):
            self._follow(kind)

    def _follow(self, kind: type[Link | TcpLink]) -> None:
        opened, packed = kind.__init__, kind._packed  # type: ignore[misc]

        @wraps(opened)
        def open_and_note(link: Link | TcpLink, *arguments: Any, **named: Any) -> None:
            opened(link, *arguments, **named)
            self._all.add(link)

        @wraps(packed)
        def pack_or_halve(link: Any, messages: Any) -> bytes:
            data: bytes = packed(link, messages)
            if self._halving.is_set():
                self._halving.clear()
                # The sender takes all of its messages for unwritten: a whole one among these bytes would arrive twice.
                first = packed(link, messages[:1])
                _shut_down(link, first[: len(first) // 2])
            return data

        kind.__init__ = open_and_note  # type: ignore[method-assign, misc]
        kind._packed = pack_or_halve  # type: ignore[method-assign, assignment]

    def harm(self, action: str) -> None:
        """Carries out one of `LINK_ACTIONS`, in any thread."""
        if action == "halve":
            self._halving.set()
            return
        for link in list(self._all):
            if action == "cut":
                _shut_down(link)
            elif isinstance(link, Link):
                for _ in range(_MOST_PADDING):
                    if link.send([_PADDING]) is not Sent.WRITTEN:
                        break


def _shut_down(link: Link | TcpLink, last: bytes = b"") -> None:
    """Ends a connection from below, behind these bytes, in any thread."""
    own = link._socket if isinstance(link, Link) else link.transport and link.transport.get_extra_info("socket")
    if not own:
        return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(own.fileno())) as connection:
        if last:
            connection.send(last)
        connection.shutdown(socket.SHUT_RDWR)


class _Order:
    def __init__(self, action: str, passages: int, delay_s: float) -> None:
        self.action = action
        self.left = passages
        self.delay_s = delay_s


class _Armed:
    """The orders of this process, and how it carries them out."""

    def __init__(self, role: str, folder: Path) -> None:
        self._role = role
        self._driver = str(folder / "driver")
        self._orders: dict[str, _Order] = {}
        self._lock = threading.Lock()
        self._links = OwnLinks()
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
            if action == "fill":
                self._links.harm(action)
                continue
            with self._lock:
                self._orders.clear()
                if action != "none":
                    self._orders[point] = _Order(action, int(passages), float(delay_ms) / 1000)

    def _raise_once(self, site: Site, passages: int) -> None:
        """Let the site raise at the last of `passages` calls; never with 0."""
        site.function = function = getattr(site.function, "injected_into", site.function)
        left = [None] * passages
        if not left:
            return

        @wraps(function)
        def raising(*arguments: Any, **named: Any) -> Any:
            try:
                left.pop()
            except IndexError:  # another thread has raised already
                return function(*arguments, **named)
            if left:
                return function(*arguments, **named)
            site.function = function
            self._socket.sendto(f"{self._role} {os.getpid()} {site.name}".encode(), self._driver)
            raise InjectedFailure(site.name)

        raising.injected_into = function  # type: ignore[attr-defined]
        site.function = raising

    def passed(self, point: str) -> None:
        """Carry out the order for a point that this process passes, if there is one."""
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
            logger.warning("pause point %s can't be reported: %s", point, error)
        if order.action in LINK_ACTIONS:
            self._links.harm(order.action)
        elif order.action != "tell":
            os.kill(os.getpid(), signal.SIGKILL if order.action == "kill" else signal.SIGSTOP)


def install() -> None:
    """Arm each role that this process, or a fork of it, runs from now on, if the environment names a folder."""
    if VARIABLE not in os.environ:
        return
    import_role = roles.import_role

    def import_and_arm(role: str) -> Any:
        main = import_role(role)
        arm(role)
        return main

    roles.import_role = import_and_arm


def arm(role: str) -> None:
    """Replace the functions that are the steps of this role, if the environment names a folder. Called before it runs."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    logger.warning("pause points are armed: orders in %s may stop or kill this process", folder)
    armed = _Armed(role, Path(folder))
    if form := os.environ.get(LINK_FORM_VARIABLE):
        link_handshake.VERSION = link_folder._FORM = int(form)
        link_folder._is_address = re.compile(rf"{form}-[0-9a-f]{{16}}").fullmatch
    for name, point in POINTS.items():
        if point.role == role:
            owner, attribute, function = resolve_point(point)
            if name == "answered":
                replacement = _between_answers_and_end(function, armed)
            else:
                replacement = _around(function, name, point.is_after, armed)
            setattr(owner, attribute, replacement)


def resolve_point(point: PausePoint) -> tuple[Any, str, Callable[..., Any]]:
    """The class that has the function of this point, the function's name there, and the function."""
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
    """`BatchDispatcher.publish` in two writes, as if the worker died while the kernel accepted the data."""

    @wraps(finished)
    def passing(service: Any, batch: Any) -> Any:
        if not (batch.completions and batch.responses):
            return finished(service, batch)
        finished(service, batch._replace(completions=()))
        armed.passed("answered")
        return finished(service, batch._replace(responses=(), first=()))

    return passing


if __name__ == "__main__":
    from tests.faults import pause_points  # the module that others import, not this copy of it
    from weir.__main__ import main

    pause_points.install()
    main()
