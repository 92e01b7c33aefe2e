"""A failure of one request, batch, model or worker record affects no other, and a failed policy is replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.scheduling.requests import BODY, part
from weir.bus.kv.registry import WorkerView
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Message
from weir.runtime.containment import SITES
from weir.runtime.log_limiter import LogLimiter
from weir.scheduler.batching.custom_strategy import StrategyFiles
from weir.scheduler.batching.dispatch import Dispatch
from weir.scheduler.batching.version_queue import VersionQueue
from weir.scheduler.service import policy_failure, served_queues
from weir.scheduler.service.former_sequences import SequenceReports
from weir.scheduler.service.owned_queue import OwnedQueue
from weir.scheduler.service.service import SchedulerService
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.batches import BatchEnded, Batches, BatchMessage, Completions
from weir.schemas.wire.calls import Cancellation, Frame, unpack_responses
from weir.schemas.wire.codec import WIRE_VERSION, encode
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord

CONFIG = {"max_batch_size": 1, "dynamic_batching": {}}


class Cluster:
    """A scheduler that owns the queues of some models, each with one instance on a worker of its own."""

    def __init__(self) -> None:
        self.bus = CollectingBus()
        self.service = SchedulerService(self.bus, "scheduler", None)  # type: ignore[arg-type]
        self.failed: list[OwnedQueue] = []
        self.owned: dict[str, OwnedQueue] = {}
        self.service.queues.on_policy_failed = self.failed.append

    async def own(self, model: str, is_successor: bool = False, config: dict[str, Any] = CONFIG) -> OwnedQueue:
        former = SequenceReports([], False) if is_successor else None
        owned = self.owned[model] = await self.service.serve(LiveQueue(model), f"live-{model}", former=former)
        owned.scheduler.configure(1, ModelConfig.model_validate({"name": model, **config}))
        owned.scheduler.set_instances(f"worker-{model}", {1: 1})
        return owned

    @property
    def unanswered(self) -> int:
        """Requests that were accepted and have not ended."""
        return sum(len(owned.scheduler) for owned in self.service.queues.by_name.values())

    def frame(self, model: str, *parts: Any, ack: str = "$JS.ACK.1") -> None:
        self.bus.deliver(f"inbox.scheduler.{model}", Frame("gateway", parts).pack(), ack)

    def done(self, *batch_ids: int) -> None:
        self.bus.deliver(
            "done.scheduler",
            Completions("worker", [BatchEnded(id, 10) for id in batch_ids]).pack(),
        )

    def batches(self) -> list[BatchMessage]:
        return [batch for data in self.bus.taken("work.") for batch in Batches.unpack(data).batches]

    def errors(self) -> list[tuple[int, ErrorCode]]:
        answers = [answer for data in self.bus.taken("reply.gateway") for answer in unpack_responses(data)[1]]
        return sorted((answer.key, answer.error.code) for answer in answers if answer.error is not None)

    def acks(self) -> list[str]:
        self.service.queues.acks.flush()
        return [subject for subject, data, _ in self.bus.published if data == b"+ACK"]


@pytest.fixture
async def cluster() -> Iterator[Cluster]:  # type: ignore[misc]
    cluster = Cluster()
    await cluster.service.listen()
    for model in "ab":
        await cluster.own(model)
    cluster.bus.published.clear()
    yield cluster
    for owned in list(cluster.owned.values()):
        owned.timer.close()


def fail(monkeypatch: pytest.MonkeyPatch, owned: OwnedQueue, method: str, error: Exception | None = None) -> None:
    def raise_error(*_: object, **__: object) -> None:
        raise error or ZeroDivisionError("injected")

    monkeypatch.setattr(owned.scheduler, method, raise_error)


METHODS = ["enqueue", "overdue", "dispatch"]


@pytest.mark.parametrize("method", METHODS)
async def test_a_policy_that_raises_ends_its_own_requests_and_no_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    broken, other = cluster.owned.values()
    fail(monkeypatch, broken, method)
    broken_inbox, other_inbox = (cluster.bus._callbacks[f"inbox.scheduler.{model}"] for model in "ab")
    for inbox, key in ((broken_inbox, 1), (other_inbox, 2)):  # in one turn of the loop, as of one read of the socket
        inbox(Message("inbox", f"$JS.ACK.{key}", Frame("gateway", [part(key)]).pack(), ""))
    cluster.bus.turn()
    assert [entry.key for batch in cluster.batches() for entry in batch.entries] == [2]
    assert cluster.errors() == [(1, ErrorCode.INTERNAL)]
    assert cluster.acks() == ["$JS.ACK.1"], "the request that makes the policy fail must not come back"
    assert cluster.failed == [broken]
    assert cluster.service.queues.by_name.get(LiveQueue("b")) is other
    assert cluster.service.queues.by_name.get(LiveQueue("a")) is None


async def test_batches_of_a_failed_policy_are_redelivered_to_the_next(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.frame("a", part(1), part(2), ack="$JS.ACK.1")  # one runs, one is staged behind it
    cluster.frame("a", part(3), part(4), ack="$JS.ACK.2")  # these wait
    running = [entry.key for batch in cluster.batches() for entry in batch.entries]
    assert running == [1, 2]
    (broken, _) = cluster.owned.values()
    fail(monkeypatch, broken, "expire")
    cluster.service.queues.expire()
    assert cluster.errors() == [(3, ErrorCode.INTERNAL), (4, ErrorCode.INTERNAL)]
    assert cluster.acks() == ["$JS.ACK.2"], "the stream keeps running requests"
    await cluster.own("a", is_successor=True)
    cluster.frame("a", part(1), part(2), ack="$JS.ACK.1")  # as the consumer delivers again
    first, second = cluster.batches()
    cluster.done(first.batch_id, second.batch_id)
    assert cluster.unanswered == 0
    assert cluster.errors() == []


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[logging.LogRecord]]:
    """The errors that the test has logged so far, all within the same second."""
    monkeypatch.setattr(policy_failure, "_limited", LogLimiter(policy_failure.logger, clock=lambda: 0.0))
    return lambda: [record for record in caplog.records if record.levelno >= logging.ERROR]


def raising(error: Exception, after: Callable[..., object] = lambda *_: None) -> Callable[..., None]:
    def act(*arguments: object) -> None:
        after(*arguments)
        raise error

    return act


async def test_the_end_of_a_batch_on_which_a_policy_raises_is_logged_with_the_queue_before_it(
    cluster: Cluster, errors: Callable[[], list[logging.LogRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.frame("a", part(1), part(2))  # one runs, one is staged behind it
    cluster.frame("a", part(3), part(4, lane=1))
    running, staged = (batch.batch_id for batch in cluster.batches())
    defect = ZeroDivisionError("injected")
    monkeypatch.setattr(VersionQueue, "_release", raising(defect))  # called when the policy has removed the batch
    cluster.done(running)
    (record,) = errors()
    assert record.exc_info is not None
    assert record.exc_info[1] is defect
    text = record.getMessage()
    assert text.startswith("queue a: its policy raised an exception and is recreated; 3 waiting requests end with an ")
    assert "; event: ModelScheduler.complete(now_us=" in text
    assert f", completion=BatchEnded(batch_id={running}, busy_us=10, rescheduled=[])) > " in text
    assert f"Batch({running}, 1, Instance(worker-a, 0, held=2), [QueuedRequest(gateway, 1)])" in text
    assert "; version 1: 1 instances on worker-a, 1 busy, 0 requests in the forming batch; " in text
    assert "; waiting for version 1: 1 live, 1 event: gateway 3 4; " in text
    assert f"; batch {running}, which the event formed or ended: 1 live: gateway 1; " in text
    assert text.endswith(f"; batch {staged} on worker-a/0: 1 live: gateway 2")
    assert BODY.decode() not in text
    assert cluster.failed == [cluster.owned["a"]]


async def test_batches_that_a_policy_formed_before_it_raised_are_told_from_those_in_flight(
    cluster: Cluster, errors: Callable[[], list[logging.LogRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.frame("a", part(1))
    monkeypatch.setattr(Dispatch, "dispatch", raising(KeyError("injected"), after=Dispatch.dispatch))
    cluster.frame("a", part(2))
    (record,) = errors()
    text = record.getMessage()
    assert "; event: ModelScheduler.dispatch(now_us=" in text
    assert "; batch 1 on worker-a/0: 1 live: gateway 1; " in text
    assert text.endswith("; batch 2 on worker-a/0, which the event formed or ended: 1 live: gateway 2")


async def test_requests_are_named_in_an_event_without_their_bodies(
    cluster: Cluster, errors: Callable[[], list[logging.LogRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VersionQueue, "enqueue", raising(KeyError("injected")))
    cluster.frame("a", *map(part, range(1, 10_000)))
    (record,) = errors()
    text = record.getMessage()
    assert "; event: ModelScheduler.enqueue(requests=[QueuedRequest(gateway, 1), QueuedRequest(gateway, 2), " in text
    assert len(text) < 20_000
    assert BODY.decode() not in text


async def test_an_exception_beside_the_policy_is_logged_with_the_call_of_the_service(
    cluster: Cluster, errors: Callable[[], list[logging.LogRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, cluster.owned["a"], "cancel")
    cluster.bus.deliver("cancel.a", Cancellation("gateway", [1]).pack())
    (record,) = errors()
    assert "; event: ServedQueues._on_cancel(owned=<OwnedQueue>, message=<Message>)" in record.getMessage()


async def test_one_queue_a_second_is_described(
    cluster: Cluster, errors: Callable[[], list[logging.LogRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect may hit the queues of a thousand models at once."""
    monkeypatch.setattr(VersionQueue, "enqueue", raising(KeyError("injected")))
    for model in "ab":
        cluster.frame(model, part(1))
    first, second = (record.getMessage() for record in errors())
    assert "event: " in first
    assert second == "queue b: its policy raised an exception and is recreated; 1 waiting requests end with an error"


async def test_an_exception_in_a_queue_that_was_dropped_is_logged(
    cluster: Cluster, errors: Callable[[], list[logging.LogRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = cluster.owned["a"]
    fail(monkeypatch, broken, "in_flight_on")
    for _ in range(2):
        cluster.service.queues._in_queue(broken, cluster.service.queues._lose_worker, "worker-a", 0)
    _, again = errors()
    assert again.getMessage() == "queue a: another exception, in the policy that was dropped"
    assert again.exc_info
    assert cluster.failed == [broken]


@pytest.mark.parametrize("method", ["cancel", "complete", "worker_lost", "workers", "in_flight_on"])
async def test_any_event_may_make_a_policy_fail(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    cluster.frame("a", part(1), ack="$JS.ACK.1")
    cluster.frame("b", part(2), ack="$JS.ACK.2")
    batches = {batch.model: batch.batch_id for batch in cluster.batches()}
    broken, other = cluster.owned.values()
    fail(monkeypatch, broken, method)
    cluster.bus.deliver("cancel.a", Cancellation("gateway", [1]).pack())
    cluster.service._probe_workers()
    cluster.bus.deliver("lost.scheduler.worker-c", b"", status="503")
    cluster.done(batches["a"], batches["b"])
    assert cluster.failed == [broken]
    assert len(other.scheduler) == 0
    assert {subject for subject, _, _ in cluster.bus.published if subject.startswith("probe.")} >= {"probe.worker-b"}


async def test_a_batch_that_cannot_be_packed_ends_its_requests_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = served_queues.batch_message

    def failing_for_key_1(scheduler: str, owned: OwnedQueue, batch: Any, now_us: int, sent_ns: int) -> bytes:
        if any(request.key == 1 for request in batch.requests):
            raise OverflowError("injected")
        return pack(scheduler, owned, batch, now_us, sent_ns)

    monkeypatch.setattr(served_queues, "batch_message", failing_for_key_1)
    cluster.frame("a", part(1), part(2), part(3))
    sent: list[int] = []
    while batches := cluster.batches():
        sent += [entry.key for batch in batches for entry in batch.entries]
        cluster.done(*(batch.batch_id for batch in batches))
    assert sent == [2, 3]
    assert cluster.errors() == [(1, ErrorCode.INTERNAL)]
    assert (cluster.failed, cluster.unanswered) == ([], 0)
    assert cluster.acks() == ["$JS.ACK.1"]


async def test_a_malformed_row_does_not_affect_others_of_its_frame(cluster: Cluster) -> None:
    rows = [part(1), part(2)._replace(body="text"), None, [], ["key"], part(3)]  # type: ignore[arg-type]
    cluster.frame("a", *rows, ack="$JS.ACK.1")
    assert cluster.errors() == [(2, ErrorCode.INTERNAL)]
    for _ in range(2):
        for batch in cluster.batches():
            cluster.done(batch.batch_id)
    assert cluster.unanswered == 0
    assert cluster.service.queues.malformed_messages == 4
    assert "$JS.ACK.1" not in [subject for subject, data, _ in cluster.bus.published if data == b"+TERM"]


async def test_a_frame_of_malformed_requests_is_answered_and_acknowledged(cluster: Cluster) -> None:
    cluster.frame("a", part(7)._replace(batch_size=0), None, ack="$JS.ACK.1")
    assert cluster.errors() == [(7, ErrorCode.INTERNAL)]
    assert cluster.acks() == ["$JS.ACK.1"]


async def test_a_malformed_completion_does_not_affect_others_of_its_message(cluster: Cluster) -> None:
    cluster.frame("a", part(1))
    cluster.frame("b", part(2))
    first, second = cluster.batches()
    rows = [
        ["not", "an", "end"],
        BatchEnded(first.batch_id, 1),
        None,
        [1, "x", 3],
        BatchEnded(second.batch_id, 1),
    ]
    cluster.bus.deliver("done.scheduler", encode((WIRE_VERSION, "worker", rows)))
    assert cluster.unanswered == 0
    assert cluster.service.queues.malformed_messages == 3


async def test_malformed_records_of_a_model_do_not_affect_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = WorkerView("worker", 0.0)
    for model in "ab":
        config = {"name": model, **CONFIG}
        view.models[model] = ModelRecord(model, {1: VersionRecord(ModelState.READY, instances=2)}, config)
    cluster.service.registry.workers["worker"] = view
    broken, other = cluster.owned.values()
    fail(monkeypatch, broken, "configure")
    for model in "ab":
        cluster.service._on_model_change(model)
    assert other.scheduler.workers() == {"worker", "worker-b"}
    assert cluster.failed == []


def test_a_model_without_a_valid_name_has_no_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    files = StrategyFiles()

    def raise_error(*_: object) -> None:
        raise ValueError("embedded null byte")

    monkeypatch.setattr(files, "_path", raise_error)
    assert files.find("model", 1, ModelConfig.model_validate({"name": "model", **CONFIG})) is None


async def test_an_exception_in_a_buffered_event_does_not_affect_others(cluster: Cluster) -> None:
    lease_gate = cluster.service.lease_gate
    done: list[int] = []

    def act(number: int) -> None:
        if number == 2:
            raise RecursionError("injected")
        done.append(number)

    guarded = lease_gate.guard(act)
    lease_gate.close()
    for number in (1, 2, 3):
        guarded(number)
    lease_gate.reopen(float("inf"))
    assert done == [1, 3]


async def test_garbage_at_request_rate_is_logged_once_a_second(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            cluster.bus.deliver("inbox.scheduler.a", b"nonsense", f"$JS.ACK.{number}")
    assert len([record for record in caplog.records if "malformed" in record.getMessage()]) <= 2
    assert cluster.service.queues.malformed_messages == 50


OF_QUEUES = ("_on_cancel", "_expire_queue", "<lambda>")
"""What `ServedQueues._in_queue` does for one queue, as far as this test gets there."""


@pytest.mark.parametrize(
    ("name", "of_queue"),
    [
        *((name, None) for name in sorted(SITES) if name.startswith("weir.scheduler.service.served_queues:")),
        *(("weir.scheduler.service.served_queues:ServedQueues._in_queue", of_queue) for of_queue in OF_QUEUES),
    ],
)
async def test_no_site_of_the_scheduler_passes_an_exception_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str, of_queue: str | None
) -> None:
    """Whatever raises for model `a`: model `b` is served, and `a` is served once it has another policy."""
    function = SITES[name].function

    def failing(self: Any, *arguments: Any, **named: Any) -> Any:
        is_meant = of_queue in (None, getattr(arguments[1], "__name__", None) if len(arguments) > 1 else None)
        if is_meant and any(isinstance(each, OwnedQueue) and each.name == "a" for each in arguments):
            raise RuntimeError("injected")
        return function(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(SITES[name], "function", failing)
        cluster.frame("a", part(1), ack="$JS.ACK.1")
        cluster.frame("b", part(2), ack="$JS.ACK.2")
        cluster.bus.deliver("cancel.a", Cancellation("gateway", [9]).pack())
        cluster.bus.deliver("lost.scheduler.nobody", b"", status="503")
        cluster.service._probe_workers()
        cluster.service.queues.expire()
        cluster.done(*(batch.batch_id for batch in cluster.batches()))
        cluster.bus.deliver("statistics.query", b"", "counters.test")
        assert cluster.service.queues.by_name.get(LiveQueue("b")) is not None
        assert len(cluster.owned["b"].scheduler) == 0
    for owned in cluster.failed:
        assert cluster.service.queues.by_name.get(owned.queue) is None
        await cluster.own(owned.name, is_successor=True)
    cluster.frame("a", part(3), ack="$JS.ACK.3")
    keys = [entry.key for batch in cluster.batches() for entry in batch.entries]
    assert 3 in keys or len(cluster.owned["a"].scheduler) > 0


async def test_a_sequence_whose_checkpoint_can_not_be_looked_up_is_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests do not wait for ever, and a client may start it again."""
    config = {
        "max_batch_size": 1,
        "sequence_batching": {"max_sequence_idle_microseconds": 60_000_000},
        "parameters": {"weir_checkpoint_every": {"string_value": "1"}},
    }

    asked: list[object] = []

    async def find(_model: str, _version: int, id: int, *_others: object) -> None:
        asked.append(id)
        raise RuntimeError("unexpected")

    monkeypatch.setattr(cluster.service.queues._checkpoints, "find", find)
    async with asyncio.TaskGroup() as background:
        monkeypatch.setattr(cluster.service.queues, "_background", background)
        await cluster.own("s", is_successor=True, config=config)
        cluster.frame("s", part(1)._replace(correlation_id=7))
    assert asked == [7]
    assert [key for key, _ in cluster.errors()] == [1]
    cluster.frame("s", part(2)._replace(correlation_id=7, sequence_flags=SEQUENCE_START))
    assert [entry.key for batch in cluster.batches() for entry in batch.entries] == [2]
    assert cluster.failed == []
