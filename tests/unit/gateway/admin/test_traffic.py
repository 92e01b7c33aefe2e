"""Changes of a model's traffic by a client and by a ramp at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from tests.support.waiting import eventually
from weir.bus.kv.registry import RegistryView
from weir.bus.kv.traffic import TrafficRecords
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.history import ModelHistory
from weir.bus.streams.shadow_samples import ShadowSamples
from weir.calls.catalog import Catalog, ServedModel
from weir.calls.traffic.counters import TrafficCounters, TrafficTotals
from weir.calls.traffic.ramp import Step
from weir.durable.ramps import RampHost
from weir.gateway.admin.traffic import RampRequest, TrafficControl
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.traffic import TrafficRule
from weir.schemas.wire.traffic import ABORTED, ShadowRule


async def test_copies_that_are_set_while_a_ramp_is_aborted_do_not_revive_it(tmp_path: Path) -> None:
    nats = EmbeddedNats(tmp_path)
    nats.start()
    async with asyncio.TaskGroup() as background:
        gateway, other = [await Bus.connect(nats.url, "test", background) for _ in range(2)]
        history = ModelHistory(gateway)
        await history.start()
        catalog, records, counters = Catalog(RegistryView(gateway), True), TrafficRecords(gateway), TrafficCounters()
        catalog._served["m"] = ServedModel("m", ModelConfig(name="m"), [1, 2, 3], {})
        totals, samples = TrafficTotals(gateway, "g", counters), ShadowSamples(gateway, "g")
        control = TrafficControl(catalog, records, counters, totals, history, samples)
        await control.start()
        of_ramps = TrafficRecords(other)
        await of_ramps.start()
        ramps = RampHost(cast(Any, None), of_ramps, totals, ModelHistory(other))
        await control.set("m", TrafficRule({1: 100}))
        await control.ramp("m", RampRequest(2, 0.5, 60.0))
        await eventually(lambda: control.ramps() and of_ramps.get("m") == records.get("m"))
        ((_, ramp),) = control.ramps()
        # The gateway has not received the end of the ramp when it writes the copies.
        callbacks = dict(gateway._callbacks)
        followed = next(sid for sid, (subject, _) in gateway._subjects.items() if "traffic.>" in subject)
        gateway._callbacks[followed] = lambda _message: None
        assert await ramps._apply("m", ramp.number, Step(0.0, True, "too many errors"), 0)
        await control.shadow("m", ShadowRule(3, 0.1))
        gateway._callbacks[followed] = callbacks[followed]
        late = TrafficRecords(other)
        await late.start()
        stored = late.get("m")
        assert stored is not None
        assert stored.ramp is not None
        assert (stored.ramp.state, stored.weights, stored.shadow) == (ABORTED, {1: 100.0}, ShadowRule(3, 0.1))
        await control.stop()
        for bus in (gateway, other):
            await bus.close()
    nats.stop()
