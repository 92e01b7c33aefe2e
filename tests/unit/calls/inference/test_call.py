"""A call ends exactly once, whatever happens to it in whichever state, and holds nothing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.calls.catalog import ServedModel
from weir.calls.inference import call as inference
from weir.calls.inference.call import Call
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.offload import ReadingFailed
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal, invalid, overloaded
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.offloaded import Job
from weir.schemas.kserve.response import MAX_WRITTEN_BYTES

DECOUPLED = {"name": "m", "model_transaction_policy": {"decoupled": True}}
STREAMS = ServedModel("m", ModelConfig.model_validate(DECOUPLED), [1], {})
PLAIN = ServedModel("m", ModelConfig(name="m"), [1], {})
LONG = MAX_WRITTEN_BYTES + 1


class Codec:
    """Bodies are texts: "long" takes a helper process, "bad" is rejected. Outputs of more than a bound take one too."""

    def __init__(self, served: ServedModel = STREAMS) -> None:
        self.served = served

    def read_job(self, source: str, context: Any) -> Job | None:
        return Job("read", [source.encode()]) if "long" in source else None

    def read(self, source: str, parts: Any, context: Any) -> tuple[ServedModel, InferRequest]:
        if "bad" in source:
            raise invalid("bad")
        if "odd" in source:
            raise RuntimeError("injected")
        return self.served, InferRequest("m")

    def write_job(self, served: ServedModel, request: InferRequest, response: InferResponse) -> Job | None:
        return Job("write", [response.id.encode()])

    def write(self, served: ServedModel, request: InferRequest, response: InferResponse, parts: Any) -> str:
        if response.id == "unwritable":
            raise invalid("unwritable")
        return response.id


class World:
    """A dispatcher and helper processes that the test controls."""

    def __init__(self) -> None:
        self.pending: list[Any] = []
        self.cancelled: list[Any] = []
        self.jobs: list[asyncio.Task[list[memoryview]]] = []
        self.results: list[asyncio.Future[list[memoryview]]] = []
        self.is_crowded = False
        self.inference = SimpleNamespace(submit=self._submit, submit_packed=self._submit, cancel=self._cancel)
        self.offload = SimpleNamespace(start=self._start)
        self.limits = self.find_region = None

    def _submit(self, request: InferRequest, on_response: Callable[..., None], **_: Any) -> Any:
        pending = SimpleNamespace(on_response=on_response)
        self.pending.append(pending)
        return pending

    def _cancel(self, pending: Any) -> None:
        self.pending.remove(pending)
        self.cancelled.append(pending)

    def _start(self, operation: str, parts: Any) -> asyncio.Future[list[memoryview]]:
        if self.is_crowded:
            raise overloaded("too many")
        result = asyncio.get_running_loop().create_future()
        self.results.append(result)
        self.jobs.append(asyncio.create_task(self._work(result)))
        return self.jobs[-1]

    async def _work(self, result: asyncio.Future[list[memoryview]]) -> list[memoryview]:
        try:
            return await result
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # a thread still reads the body
            raise

    def respond(self, id: str, is_final: bool = False, size: int = 10) -> None:
        """The model responds, if it has a request."""
        if self.pending:
            pending = self.pending[0]
            if is_final:
                self.pending.remove(pending)
            pending.on_response(InferResponse("m", "1", id, [Tensor("OUT", "UINT8", [size], bytes(size))]), is_final)

    def end(self, outcome: WeirError | None) -> None:
        """The model ends its responses without one, or with an error."""
        if self.pending:
            self.pending.pop(0).on_response(outcome, True)

    async def help(self, error: Exception | None = None) -> None:
        """A helper process ends its oldest job."""
        results = [result for result in self.results if not result.done()]
        if results and error is None:
            results[0].set_result([memoryview(b"done")])
        elif results and error is not None:
            results[0].set_exception(error)
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Door(Call):
    """Records what a client gets: texts, errors, and `end`."""

    kind = "test"

    def __init__(
        self, world: World, source: Any, codec: Codec | None = None, ledger: MemoryLedger | None = None
    ) -> None:
        self.ledger = ledger or MemoryLedger()
        super().__init__(world, codec or Codec(), self.ledger.account("client"))  # type: ignore[arg-type]
        self.source = source
        self.got: list[Any] = []
        self.ends = 0
        self.is_gone = False
        self.broken: list[str] = []  # promises; a call would contain an exception
        self.releases = 0
        self.world = world

    def begin(self) -> Any:
        if isinstance(self.source, Exception):
            raise self.source
        return self.source

    def send(self, encoded: str | None, is_final: bool) -> None:
        self._take(encoded, is_final)

    def fail(self, error: WeirError, is_final: bool = True) -> None:
        self._take(error, is_final)

    def _take(self, what: Any, is_final: bool) -> None:
        if self.is_gone or self.ends:
            self.broken.append(f"{what} after the end")
        self.got.append(what)
        self.ends += is_final

    def release(self) -> None:
        if not all(job.done() for job in self.world.jobs):
            self.broken.append("a helper process reads memory that is another's")
        self.releases += 1

    def leave(self) -> None:
        self.is_gone = True
        self.cancel()


def texts(door: Door) -> list[str]:
    return [what.message if isinstance(what, WeirError) else what for what in door.got]


async def test_a_short_request_is_read_and_answered_at_once() -> None:
    world = World()
    door = Door(world, "short", Codec(PLAIN))
    door.open()
    world.respond("a", is_final=True)
    assert (door.got, door.ends, door.releases, world.jobs) == (["a"], 1, 1, [])


async def test_a_request_that_is_read_already_needs_no_codec() -> None:
    world = World()
    door = Door(world, (PLAIN, InferRequest("m"), None))
    door.open()
    world.respond("a", is_final=True)
    assert door.got == ["a"]


@pytest.mark.parametrize(
    ("source", "text"), [("bad", "bad"), (invalid("begin"), "begin"), ("odd", "internal server error")]
)
async def test_what_can_not_be_read_is_an_error(source: Any, text: str) -> None:
    door = Door(World(), source)
    door.open()
    assert (texts(door), door.ends, door.releases) == ([text], 1, 1)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ReadingFailed("the process that read the request has died"), "the process that read the request has died"),
        (ValueError("unexpected"), "internal server error"),
    ],
)
async def test_a_helper_that_dies_fails_its_call_alone(error: Exception, text: str) -> None:
    world = World()
    doors = [Door(world, "long"), Door(world, "long")]
    for door in doors:
        door.open()
    await world.help(error)
    await world.help()
    world.end(None)
    assert texts(doors[0]) == [text]
    assert doors[1].got == [None]


async def test_too_many_jobs_are_an_error() -> None:
    world = World()
    world.is_crowded = True
    door = Door(world, "long")
    door.open()
    assert [error.retry_after_s for error in door.got] == [1]


async def test_the_end_of_a_stopping_server_is_an_error() -> None:
    world = World()
    door = Door(world, "long")
    door.open()
    world.jobs[0].cancel()
    await settled()
    assert texts(door) == ["the server is stopping"]


async def test_a_model_that_must_respond_once_and_does_not() -> None:
    world = World()
    door = Door(world, "short", Codec(PLAIN))
    door.open()
    world.end(None)
    assert texts(door) == ["expected a single response, got 0"]


async def test_responses_keep_their_order_behind_one_that_a_helper_writes() -> None:
    world = World()
    door = Door(world, "short")
    door.open()
    world.respond("a")
    world.respond("b", size=LONG)
    world.respond("c")
    world.respond("unwritable", size=LONG)
    world.respond("d", is_final=True)
    assert door.got == ["a"]
    assert door.ledger.total_bytes > LONG
    await world.help()
    assert door.got == ["a", "b", "c"]
    await world.help()
    assert texts(door) == ["a", "b", "c", "unwritable", "d"]
    assert (door.ends, door.ledger.total_bytes) == (1, 0)


async def test_a_held_call_sends_nothing_until_it_is_resumed() -> None:
    world = World()
    door = Door(world, "short")
    door.open()
    door.hold()
    for id in "abc":
        world.respond(id)
    world.end(None)
    assert door.got == []
    assert door.has_waiting
    door.resume()
    assert (door.got, door.ends) == (["a", "b", "c", None], 1)
    assert door.ledger.total_bytes == 0


async def test_a_rejection_waits_for_its_turn_too() -> None:
    door = Door(World(), "bad")
    door.hold()
    door.open()
    assert door.got == []
    door.resume()
    assert (texts(door), door.ends) == (["bad"], 1)


async def test_a_rejection_by_a_helper_waits_for_its_turn_too() -> None:
    world = World()
    door = Door(world, "bad long")
    door.hold()
    door.open()
    await world.help()
    assert door.got == []
    door.resume()
    assert (texts(door), door.ends) == (["bad"], 1)


async def test_the_body_of_a_cancelled_request_is_released_once_nothing_reads_it() -> None:
    world = World()
    door = Door(world, "long")
    door.open()
    await settled()
    door.leave()
    assert door.releases == 0
    await settled()
    assert world.jobs[0].cancelled()
    assert (door.releases, door.got, door.broken) == (1, [], [])


async def test_a_reader_that_falls_behind_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "MAX_WAITING_BYTES", 10_000)
    world = World()
    door = Door(world, "short")
    door.open()
    door.hold()
    sent = 0
    while not door.ends:
        world.respond("x", size=1000)
        sent += 1
    assert sent == 9
    assert "fallen behind" in texts(door)[0]
    assert (len(world.cancelled), door.ledger.total_bytes) == (1, 0)
    door.resume()
    assert len(door.got) == 1


async def test_what_waits_is_bounded_by_memory() -> None:
    world = World()
    door = Door(world, "short", ledger=MemoryLedger(10_000))
    door.open()
    door.hold()
    while not door.ends:
        world.respond("x", size=1000)
        assert door.ledger.total_bytes <= 5000
    assert (len(world.cancelled), door.ledger.total_bytes) == (1, 0)


async def test_a_model_that_is_faster_than_a_helper_is_not_the_fault_of_its_client() -> None:
    world = World()
    door = Door(world, "short")
    door.open()
    count = inference.MAX_WAITING_BYTES // LONG + 2
    for number in range(count):
        world.respond(str(number), size=LONG)
    for _ in range(count):
        await world.help()
    assert door.got == [str(number) for number in range(count)]


async def test_much_that_waits_is_written_in_several_turns() -> None:
    world = World()
    door = Door(world, "short")
    door.open()
    door.hold()
    size, count = MAX_WRITTEN_BYTES, 3 * inference.DRAIN_BYTES // MAX_WRITTEN_BYTES
    for number in range(count):
        world.respond(str(number), size=size)
    door.resume()
    assert 0 < len(door.got) <= inference.DRAIN_BYTES // size + 1
    world.respond("last", is_final=True)
    await settled()
    assert door.got == [*map(str, range(count)), "last"]


async def test_an_exception_while_a_response_is_written_is_an_internal_error() -> None:
    class Broken(Codec):
        def write(self, *_: Any) -> str:
            raise RuntimeError("injected")

    world = World()
    door = Door(world, "short", Broken())
    door.open()
    world.respond("a")
    assert (texts(door), door.ends) == (["internal server error"], 1)
    assert len(world.cancelled) == 1


EVENTS = [
    "respond",
    "respond long",
    "respond last",
    "error amid",
    "end",
    "fail",
    "help",
    "helper dies",
    "hold",
    "resume",
]


@settings(deadline=None, database=None, max_examples=400)
@given(
    st.sampled_from(["short", "long", "bad", "bad long", "odd"]),
    st.lists(st.sampled_from(EVENTS), max_size=25),
    st.integers(-1, 25),
)
def test_every_call_ends_once_in_order_and_leaves_nothing(source: str, events: list[str], leaves_at: int) -> None:
    async def run() -> None:
        world = World()
        door = Door(world, source)
        door.open()
        expected: list[str] = []
        for number, event in enumerate(events):
            if number == leaves_at:
                door.leave()
            await act(world, door, event, str(number), expected)
        door.resume()
        for _ in range(30):
            await world.help()
        if not door.is_gone and not door.ends:
            world.end(None)
            await settled()
            assert door.ends == 1
        responses = [what for what in door.got if isinstance(what, str)]
        left = iter(expected)
        assert all(
            id in left for id in responses
        )  # in order; an error takes the place of one that could not be written
        if door.ends and not any(isinstance(what, WeirError) for what in door.got):
            assert responses == expected
        if door.is_gone and not door.ends:
            assert not world.pending
        assert door.broken == []
        assert door.ledger.total_bytes == 0
        assert door.releases >= 1
        assert all(job.done() for job in world.jobs)

    asyncio.run(run())


async def act(world: World, door: Door, event: str, id: str, expected: list[str]) -> None:
    if event.startswith("respond") and world.pending:
        expected.append(id)
    match event:
        case "respond":
            world.respond(id)
        case "respond long":
            world.respond(id, size=LONG)
        case "respond last":
            world.respond(id, is_final=True)
        case "error amid":
            if world.pending:
                world.pending[0].on_response(internal("amid"), False)
        case "end":
            world.end(None)
        case "fail":
            world.end(internal("failed"))
        case "help":
            await world.help()
        case "helper dies":
            await world.help(ReadingFailed("died"))
        case "hold":
            door.hold()
        case "resume":
            door.resume()
