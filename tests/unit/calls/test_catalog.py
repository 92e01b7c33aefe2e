"""The catalog of models from the records of workers in a real registry."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from weir.bus.kv.registry import RegistryView, RegistryWriter
from weir.bus.naming.identity import own_id
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import ensure_streams
from weir.calls.catalog import RECOVERY_GRACE_S, Catalog
from weir.schemas.config.model_config import ModelConfig, ModelInput, ModelOutput
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.wire.registry import UNLOADED, ModelRecord, ModelState, VersionRecord, WorkerRecord

CONFIG = ModelConfig(
    name="m",
    backend="python",
    input=[ModelInput(name="IN", data_type="TYPE_FP32", dims=[1])],
    output=[ModelOutput(name="OUT", data_type="TYPE_FP32", dims=[1])],
).model_dump(exclude_defaults=True)


class Cluster:
    """A catalog, the workers that write to its registry, and the catalog's clock."""

    def __init__(self, bus: Bus, strict: bool) -> None:
        self._bus = bus
        self.now_s = 0.0
        self.registry = RegistryView(bus)
        self.catalog = Catalog(self.registry, strict, clock=lambda: self.now_s)
        self._writers: dict[str, RegistryWriter] = {}

    async def settle(self, worker: str, draining: bool = False, **more: list[str]) -> None:
        record = WorkerRecord(worker, 1, settled=True, draining=draining, written_ns=time.time_ns(), **more)  # type: ignore[arg-type]
        await self._writer(worker).write_worker(record)
        await self._bus.flush()

    async def load(self, worker: str, name: str = "m", reason: str = "", **states: ModelState) -> None:
        """`worker` has versions ("v1") of the model in these states."""
        versions = {int(v[1:]): VersionRecord(state, instances=1) for v, state in states.items()}
        config = None if reason else {**CONFIG, "name": name}
        record = ModelRecord(name, versions, config, {"OUT": ["cat"]}, reason, time.time_ns())
        await self._writer(worker).write_model(record)
        await self._bus.flush()

    async def tell(self, worker: str, version: VersionRecord) -> None:
        """`worker` has version 1 of the model like this."""
        record = ModelRecord("m", {1: version}, {**CONFIG, "name": "m"}, written_ns=time.time_ns())
        await self._writer(worker).write_model(record)
        await self._bus.flush()

    async def write(self, worker: str, record: ModelRecord) -> None:
        await self._writer(worker).write_model(record)
        await self._bus.flush()

    async def leave(self, worker: str) -> None:
        await self._writer(worker).remove_all()
        await self._bus.flush()

    def refusal(self, name: str, version: str = "") -> tuple[ErrorCode, str]:
        with pytest.raises(WeirError) as refused:
            self.catalog.resolve(name, version)
        return refused.value.code, refused.value.message

    def _writer(self, worker: str) -> RegistryWriter:
        return self._writers.setdefault(worker, RegistryWriter(self._bus, worker))


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats(Path(tmp_path_factory.mktemp("nats")))
    yield server.start()
    server.stop()


@asynccontextmanager
async def cluster(nats_url: str, strict: bool = True) -> AsyncIterator[Cluster]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats_url, "test", background)
        await ensure_streams(bus)
        opened = Cluster(bus, strict)
        await opened.registry.start(background)
        try:
            yield opened
        finally:
            for worker in list(opened.registry.workers):
                await opened.registry.erase(worker)
            await bus.close()


async def test_a_version_that_can_not_run_for_now_is_accepted_and_not_ready(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.settle("w1")
        await c.tell("w1", VersionRecord(ModelState.READY, problem="its process has died"))
        assert c.catalog.resolve("m", "1").versions == [1]
        assert not c.catalog.is_ready("m", "")
        assert not c.catalog.server_ready()
        await c.tell("w2", VersionRecord(ModelState.READY, instances=1, checks_readiness=True))
        assert c.catalog.is_ready("m", "1")
        assert c.catalog.server_ready()
        assert [worker for worker, row in c.catalog.ready_replicas("m", 1) if row.checks_readiness] == ["w2"]


async def test_a_model_that_stays_on_its_host_is_unavailable_on_others(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        reason = "its outputs have at least 9 bytes"
        row = VersionRecord(ModelState.READY, instances=1)
        here, elsewhere = own_id("worker", None), "worker-01234567-1_1"
        await c.settle(elsewhere)
        await c.write(elsewhere, ModelRecord("m", {1: row}, CONFIG, written_ns=time.time_ns(), stays_on_host=reason))
        assert c.refusal("m", "1")[0] is ErrorCode.UNAVAILABLE
        assert c.catalog.index() == [{"name": "m", "versions": [], "state": "UNAVAILABLE", "reason": reason}]
        assert not c.catalog.is_ready("m", "1")
        await c.write(here, ModelRecord("m", {1: row}, CONFIG, written_ns=time.time_ns(), stays_on_host=reason))
        assert c.catalog.resolve("m", "1").versions == [1]


async def test_during_the_warmup_no_model_is_unknown(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        assert c.refusal("m")[0] is ErrorCode.NOT_FOUND, "only gateways look out for it"
        c.catalog.start_warmup()
        with pytest.raises(WeirError, match="'m' is not found yet, the server is not ready") as refused:
            c.catalog.resolve("m", "")
        assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.UNAVAILABLE, 1)
        await c.load("w1", v1=ModelState.LOADING)
        assert c.refusal("m", "1")[0] is c.refusal("m", "2")[0] is c.refusal("other")[0] is ErrorCode.UNAVAILABLE
        await c.load("w1", v1=ModelState.READY)
        assert c.catalog.resolve("m", "").versions == [1], "what is there is served before all is"
        assert not c.catalog.server_ready()
        await c.settle("w1")
        assert c.catalog.server_ready()
        assert c.refusal("other") == (ErrorCode.NOT_FOUND, "Request for unknown model: 'other' is not found")
        assert c.catalog.warmup_error("other") is None


async def test_a_load_of_a_model_that_cannot_be_read_leaves_the_server_ready(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.load("w1", v1=ModelState.READY)
        await c.settle("w1")
        await c.write(
            "w1",
            ModelRecord(
                "n", reason="config.pbtxt:3:1: no", written_ns=1, revision=5, error_code=ErrorCode.INTERNAL.number
            ),
        )
        assert c.catalog.knows("n")
        assert c.catalog.server_ready(), "as in Triton, it is no model of the server"
        await c.write("w1", ModelRecord("n", reason="config.pbtxt:3:1: no", written_ns=2))
        assert not c.catalog.server_ready(), "one of the start is missed"


@pytest.mark.parametrize("tells", [True, False])
async def test_the_error_about_a_model_that_failed_says_why_where_all_may_know(nats_url: str, tells: bool) -> None:
    async with cluster(nats_url) as c:
        c.catalog.tells_reasons = tells
        traceback = "Internal: ValueError: no\n\nAt:\n  /srv/models/m/1/model.py(3): <module>"
        versions = {
            1: VersionRecord(ModelState.UNAVAILABLE, UNLOADED),
            2: VersionRecord(ModelState.UNAVAILABLE, traceback),
        }
        await c.write("w1", ModelRecord("m", versions, written_ns=1))
        nothing = "Request for unknown model: 'm' has no available versions"
        assert c.refusal("m")[1] == (f"{nothing}: Internal: ValueError: no" if tells else nothing)
        await c.write("w1", ModelRecord("m", reason="x" * 1000, written_ns=2))
        assert c.refusal("m")[1] == (f"{nothing}: {'x' * 300}…" if tells else nothing)
        await c.write("w1", ModelRecord("m", {1: versions[1]}, written_ns=3))
        assert c.refusal("m")[1] == nothing, "it was unloaded on request"


async def test_ready_versions_are_served(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.load("w1", v1=ModelState.READY, v2=ModelState.LOADING, v3=ModelState.READY)
        served = c.catalog.resolve("m", "")
        assert (served.versions, served.latest, served.labels) == ([1, 3], "3", {"OUT": ["cat"]})
        assert c.catalog.resolve("m", "1") is c.catalog.resolve("m", "01") is served
        assert [c.catalog.is_ready("m", v) for v in ("", "1", "2", "3", "4")] == [True, True, False, True, False]
        assert not c.catalog.is_ready("other", "")


async def test_errors_have_tritons_texts(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        assert c.refusal("m") == (ErrorCode.NOT_FOUND, "Request for unknown model: 'm' is not found")
        await c.load("w1", v2=ModelState.LOADING)
        assert c.refusal("m") == (ErrorCode.NOT_FOUND, "Request for unknown model: 'm' has no available versions")
        assert c.refusal("m", "2") == (
            ErrorCode.UNAVAILABLE,
            "Request for unknown model: 'm' version 2 is not at ready state",
        )
        assert c.refusal("m", "9") == (
            ErrorCode.NOT_FOUND,
            "Request for unknown model: 'm' version 9 is not found",
        )
        for version in ("x", "-1", "１", "9" * 20, "1" * 5000):
            assert c.refusal("m", version)[0] is ErrorCode.INVALID_ARG


async def test_the_versions_of_all_workers_are_served(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.load("w1", v1=ModelState.READY)
        await c.load("w2", v2=ModelState.READY)
        assert c.catalog.resolve("m", "").versions == [1, 2]
        await c.leave("w2")
        assert c.catalog.resolve("m", "").versions == [1]


async def test_a_model_that_lost_its_last_worker_is_accepted_for_a_while_but_not_ready(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.settle("w1")
        await c.load("w1", v1=ModelState.READY)
        await c.leave("w1")
        await c.settle("w2")
        assert c.catalog.resolve("m", "").versions == [1]
        assert not c.catalog.is_ready("m", "")
        assert not c.catalog.server_ready()
        await c.load("w2", v1=ModelState.LOADING)
        assert not c.catalog.is_ready("m", "")
        await c.load("w2", v1=ModelState.READY)
        assert c.catalog.is_ready("m", "")
        assert c.catalog.server_ready()


async def test_a_model_that_does_not_come_back_is_forgotten(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.settle("w2")
        await c.load("w1", v1=ModelState.READY)
        await c.leave("w1")
        c.now_s = RECOVERY_GRACE_S + 1
        # Without anybody having asked for it, it keeps the server from being ready no longer.
        assert c.catalog.server_ready()
        assert c.catalog.names() == []
        assert c.refusal("m")[0] is ErrorCode.NOT_FOUND


async def test_a_model_that_fails_to_reload_is_rejected_at_once(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.load("w1", v1=ModelState.READY)
        await c.load("w1", v1=ModelState.UNAVAILABLE)
        assert c.refusal("m")[1] == "Request for unknown model: 'm' has no available versions"


@pytest.mark.parametrize("strict", [True, False])
async def test_a_broken_model_affects_strict_readiness_only(nats_url: str, strict: bool) -> None:
    async with cluster(nats_url, strict) as c:
        await c.load("w1", v1=ModelState.READY)
        assert not c.catalog.server_ready(), "nobody has settled"
        await c.settle("w1")
        assert c.catalog.server_ready()
        await c.load("w1", "broken", reason="INVALID_ARG: why")
        assert c.catalog.server_ready() is not strict
        assert [(row["name"], row["state"], row["reason"]) for row in c.catalog.index()] == [
            ("broken", "UNAVAILABLE", "INVALID_ARG: why"),
            ("m", "READY", ""),
        ]


@pytest.mark.parametrize("strict", [True, False])
async def test_a_repository_that_was_never_read_makes_the_server_unready(nats_url: str, strict: bool) -> None:
    async with cluster(nats_url, strict) as c:
        await c.settle("w1", unreadable=["why"], never_read=["why"])
        assert not c.catalog.server_ready(), "as Triton, which has not initialized then"
        await c.settle("w1", unreadable=["why"])
        assert c.catalog.server_ready() is not strict
        await c.settle("w1", unreadable=["why"], never_read=["why"])
        await c.settle("w2")
        assert c.catalog.server_ready() is not strict, "another worker has them"
        await c.settle("w1")
        assert c.catalog.server_ready()


async def test_models_of_draining_workers_do_not_count(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.settle("w1")
        await c.load("w1", v1=ModelState.READY)
        await c.load("w2", v1=ModelState.READY)
        await c.settle("w1", draining=True)
        assert c.catalog.is_ready("m", "")
        assert not c.catalog.server_ready(), "the other has not settled"
        await c.settle("w2")
        assert c.catalog.server_ready()


async def test_a_changed_configuration_is_served(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.load("w1", v1=ModelState.READY)
        before: Any = c.catalog.resolve("m", "")
        await c.load("w1", v1=ModelState.READY, v2=ModelState.READY)
        after = c.catalog.resolve("m", "")
        assert (before.versions, after.versions) == ([1], [1, 2])
        assert after.templates is not before.templates


async def test_unloading_models_are_rejected_and_do_not_affect_readiness(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.settle("w1")
        await c.load("w1", v1=ModelState.READY)
        await c.load("w1", v1=ModelState.UNLOADING)
        assert c.refusal("m")[1] == "Request for unknown model: 'm' has no available versions"
        assert c.refusal("m", "1")[1] == "Request for unknown model: 'm' version 1 is not at ready state"
        assert not c.catalog.server_ready()
        await c.tell("w1", VersionRecord(ModelState.UNAVAILABLE, UNLOADED))
        assert c.catalog.server_ready()
        await c.tell("w1", VersionRecord(ModelState.UNAVAILABLE, "Internal: why"))
        assert not c.catalog.server_ready()


async def test_one_failed_version_affects_strict_readiness(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.settle("w1")
        await c.load("w1", v1=ModelState.READY, v2=ModelState.UNAVAILABLE)
        assert c.catalog.is_ready("m", "")
        assert not c.catalog.server_ready()
        await c.settle("w2")
        await c.load("w2", v2=ModelState.READY)
        assert c.catalog.server_ready(), "another worker has it"


async def test_the_index_names_the_failure_behind_unloaded_versions(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        versions = {
            1: VersionRecord(ModelState.UNAVAILABLE, UNLOADED),
            2: VersionRecord(ModelState.UNAVAILABLE, "Internal: not a model"),
        }
        await c.write("w1", ModelRecord("m", versions, written_ns=time.time_ns()))
        assert [row["reason"] for row in c.catalog.index()] == ["Internal: not a model"]


async def test_an_unloaded_model_is_not_waited_for(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.settle("w1")
        await c.load("w1", v1=ModelState.READY)
        c.catalog.set_unwanted_check(lambda name: name == "m")
        await c.leave("w1")
        assert c.refusal("m")[1] == "Request for unknown model: 'm' is not found"


async def test_the_load_digest_covers_all_workers(nats_url: str) -> None:
    async with cluster(nats_url) as c:

        async def load_told(worker: str, load: str) -> str:
            await c.tell(worker, VersionRecord(ModelState.READY, instances=1, load=load))
            return c.catalog.resolve("m", "").loads[1]

        alone = await load_told("w1", "x")
        assert await load_told("w2", "x") == alone, "one more who has the same"
        both = await load_told("w2", "y")
        assert both != alone
        assert await load_told("w1", "y") not in (alone, both)
        assert await load_told("w2", "") == "", "an older worker does not tell"


async def test_an_ambiguous_name_needs_its_namespace(nats_url: str) -> None:
    refused = (
        ErrorCode.INVALID_ARG,
        "There are 2 identifiers of model 'm' in global map, model namespace must be provided to resolve ambiguity.",
    )
    async with cluster(nats_url) as c:
        await c.settle("w1")
        await c.load("w1", "/a::m", v1=ModelState.READY)
        await c.load("w1", "/b::m", v1=ModelState.UNAVAILABLE)
        await c.load("w1", "/b::other", v1=ModelState.READY)
        assert c.refusal("m") == c.refusal("m", "1") == c.refusal("m", "7") == refused
        assert c.refusal("m", "x")[0] is ErrorCode.INVALID_ARG
        assert c.catalog.resolve("/a::m", "").name == "/a::m"
        assert c.catalog.served_model("m") is None
        assert not c.catalog.is_ready("m", "")
        assert c.catalog.is_ready("/a::m", "1")
        assert [c.catalog.knows(name) for name in ("/a::m", "/b::m", "m", "/c::m")] == [True, True, False, False]

        assert c.catalog.resolve("other", "").name == "/b::other"
        assert c.catalog.is_ready("other", "1")
        assert c.refusal("other", "7")[0] is ErrorCode.NOT_FOUND
        unloaded = {1: VersionRecord(ModelState.UNAVAILABLE, UNLOADED)}
        for name in ("/a::m", "/b::m"):
            await c.write("w1", ModelRecord(name, unloaded, CONFIG, written_ns=time.time_ns()))
        assert c.refusal("m")[0] is ErrorCode.NOT_FOUND
        await c.load("w1", "m", v1=ModelState.READY)
        assert c.catalog.resolve("m", "1").name == "m"


async def test_an_ambiguous_name_stays_ambiguous_without_its_worker(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        for name in ("/a::m", "/b::m"):
            await c.load("w1", name, v1=ModelState.READY)
        await c.leave("w1")
        assert c.refusal("m")[0] is ErrorCode.INVALID_ARG
        assert c.catalog.knows("/a::m"), "so that ensembles wait for it"
