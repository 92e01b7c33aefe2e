"""`QueueProvisioner`: a gateway that does not consume durable queues makes sure that they have consumers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from weir.durable.api import acceptance
from weir.durable.api.acceptance import PROVISION_MAX_AGE_S, QueueProvisioner


class Consumers:
    """Notes which queues were checked."""

    checked: list[tuple[str, str]]

    def __init__(self, _bus: Any) -> None:
        type(self).checked = []

    async def ensure(self, lane: str, model: str) -> None:
        self.checked.append((lane, model))


async def test_a_queue_is_checked_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "QueueConsumers", Consumers)
    bus: Any = None
    provisioner = QueueProvisioner(bus)
    for model in ("a", "a", "b"):
        await provisioner.ensure(model)
    assert Consumers.checked == [("event", "a"), ("event", "b")]
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + PROVISION_MAX_AGE_S + 1)
    await provisioner.ensure("a")
    assert Consumers.checked[2:] == [("event", "a")]
