"""What `ClusterView` knows without a collection: whether a gateway replies, and how workers load models."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from msgspec.structs import replace

from tests.support.collecting_bus import CollectingBus
from weir.bus.naming import subjects
from weir.console.collection.view import ClusterView
from weir.schemas.wire.registry import RoleRecord, WorkerRecord


class Bus(CollectingBus):
    """A bus that stays connected."""

    def on_reconnect(self, listener: object) -> None:
        pass


def view_on(bus: Bus) -> ClusterView:
    return ClusterView(cast(Any, bus), "console-1", "nats://127.0.0.1:4222")


async def test_a_gateway_replies_from_its_announcement_until_it_leaves() -> None:
    bus = Bus()
    view = view_on(bus)
    await view._gateways.start()
    assert not view.has_gateway
    await view.wait_without_gateway()
    gateway = RoleRecord(role="gateway", id="gateway-1", host="ab", pid=1, since_ms=1)
    bus.deliver(subjects.presence("gateway", "gateway-1"), gateway.pack())
    assert view.has_gateway
    waiting = asyncio.create_task(view.wait_without_gateway())
    await asyncio.sleep(0)
    assert not waiting.done()
    bus.deliver(subjects.presence("gateway", "gateway-1"), replace(gateway, leaving=True).pack())
    await waiting
    assert not view.has_gateway


def test_models_are_loaded_on_request_if_any_worker_does_so() -> None:
    view = view_on(Bus())
    assert view.control_mode == ""
    for mode, seen in (("none", "none"), ("poll", "poll"), ("explicit", "explicit")):
        record = WorkerRecord(f"worker-{mode}", 1, settled=True, written_ns=1, model_control_mode=mode)
        view._registry._apply(record.worker, record.pack())
        assert view.control_mode == seen
