"""Cheap HTTP clients for cluster benchmarks, and tables of figures.

Requests are prepared bytes on open connections, and only the value of a response is checked: each request carries a
number and expects it back. `closed_loop` keeps a number of requests in flight; `open_loop` sends at a fixed rate and
retries an unanswered request at the next gateway.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

_HEADER = (
    b'{"inputs":[{"name":"IN","datatype":"INT64","shape":[1,1],"parameters":{"binary_data_size":8}}],'
    b'"outputs":[{"name":"OUT","parameters":{"binary_data":true}}]}'
)
RETRY_S = 0.05
"""After an answer that asks to come again, or none at all."""


class Failed(Exception):
    """An answer that is an error; `args` are its status and text."""


@dataclass(slots=True)
class Request:
    """One request: when it was due and was answered (monotonic seconds; 0: never), and how often it was sent.

    `error` is that of its last try; it is sent no more when it `is_over`.
    """

    model: str
    due_s: float
    answered_s: float = 0.0
    tries: int = 0
    error: str = ""
    is_over: bool = False


@dataclass
class Account:
    """All of them."""

    requests: list[Request] = field(default_factory=list)

    def latencies_ms(self, since_s: float = 0.0) -> list[float]:
        """Of those answered that were due since then, ascending."""
        return sorted((r.answered_s - r.due_s) * 1000 for r in self.requests if r.answered_s and r.due_s >= since_s)


class Connection:
    """One connection to one gateway, opened when it is first used and after each failure."""

    def __init__(self, place: str) -> None:
        self._host, _, port = place.rpartition(":")
        self._port = int(port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def infer(self, model: str, value: int) -> None:
        """Raises OSError or EOFError without an answer, Failed with an error or another value."""
        try:
            if self._reader is None or self._writer is None:
                self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
            body = _HEADER + value.to_bytes(8, "little")
            self._writer.write(
                b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (model.encode(), len(_HEADER), len(body), body)
            )
            head = await self._reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
            content = await self._reader.readexactly(length)
        except BaseException:
            self.close()
            raise
        status = head.split(b" ", 2)[1]
        if status != b"200":
            raise Failed(status.decode(), content[:200].decode(errors="replace"))
        if content[-8:] != value.to_bytes(8, "little"):
            raise Failed("wrong", f"{content[-8:]!r} for {value}")

    def close(self) -> None:
        """Lets go of it."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def wait_ready(places: Sequence[str], models: Sequence[str], timeout_s: float = 60.0) -> None:
    """Returns when each gateway answers for each model."""
    deadline_s = time.monotonic() + timeout_s
    for place in places:
        for model in models:
            connection = Connection(place)
            while True:
                try:
                    await asyncio.wait_for(connection.infer(model, 1), 5.0)
                    break
                except (OSError, EOFError, Failed, TimeoutError) as error:
                    if time.monotonic() > deadline_s:
                        raise SystemExit(f"{model} at {place} is not ready: {error}") from error
                    await asyncio.sleep(0.1)
            connection.close()


async def closed_loop(places: Sequence[str], model: str, under_way: int, seconds: float) -> Account:
    """`under_way` callers that ask again as soon as they have their answer. The first fifth of the time is not counted."""
    account, values = Account(), count(1)
    begin_s = time.monotonic()
    end_s = begin_s + seconds

    async def ask(connection: Connection) -> None:
        while (now_s := time.monotonic()) < end_s:
            request = Request(model, now_s)
            try:
                await connection.infer(model, next(values))
                request.answered_s = time.monotonic()
            except (OSError, EOFError, Failed) as error:
                request.error = str(error)
                await asyncio.sleep(RETRY_S)
            if now_s > begin_s + seconds / 5:
                account.requests.append(request)
        connection.close()

    await asyncio.gather(*(ask(Connection(places[number % len(places)])) for number in range(under_way)))
    return account


class OpenLoop:
    """Sends `rate` requests a second, to models and gateways in turn, until it is stopped.

    With `retries` a request that was not answered, or refused for the moment, is sent again, to the next gateway, for
    `patience_s` after it was due.
    """

    def __init__(
        self, places: Sequence[str], models: Sequence[str], rate: float, retries: bool = True, patience_s: float = 30.0
    ) -> None:
        self._places = places
        self._models = models
        self._rate = rate
        self._retries = retries
        self._patience_s = patience_s
        self._idle: dict[str, list[Connection]] = {place: [] for place in places}
        self._running: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.account = Account()

    async def run(self) -> Account:
        """Sends until `stop`, then waits for what is under way."""
        begin_s = time.monotonic()
        for number in count():
            due_s = begin_s + number / self._rate
            wait_s = due_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if self._stopped:
                break
            request = Request(self._models[number % len(self._models)], due_s)
            self.account.requests.append(request)
            task = asyncio.create_task(self._ask(request, number))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        if self._running:
            await asyncio.wait(self._running)
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        return self.account

    def stop(self) -> None:
        """Sends no more."""
        self._stopped = True

    @property
    def under_way(self) -> int:
        """Requests without an end."""
        return len(self._running)

    async def _ask(self, request: Request, number: int) -> None:
        try:
            await self._try(request, number)
        finally:
            request.is_over = True

    async def _try(self, request: Request, number: int) -> None:
        # Models and gateways go in turn with different strides, or each model would keep to one gateway.
        at = number // len(self._models) + number
        while True:
            place = self._places[(at + request.tries) % len(self._places)]
            request.tries += 1
            idle = self._idle[place]
            connection = idle.pop() if idle else Connection(place)
            try:
                left_s = max(0.01, request.due_s + self._patience_s - time.monotonic())
                await asyncio.wait_for(connection.infer(request.model, number), left_s)
            except (OSError, EOFError, Failed, TimeoutError) as error:
                connection.close()
                request.error = str(error) or type(error).__name__
                is_over = time.monotonic() > request.due_s + self._patience_s
                if not self._retries or is_over or (isinstance(error, Failed) and error.args[0] not in ("503", "429")):
                    return
                await asyncio.sleep(RETRY_S)
                continue
            request.answered_s, request.error = time.monotonic(), ""
            idle.append(connection)
            return


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns two spaces apart, the first one flush left and the others flush right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def quantile(ascending: Sequence[float], share: float) -> float:
    """The least value that at least `share` of them are not above; 0 of none."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else 0.0
