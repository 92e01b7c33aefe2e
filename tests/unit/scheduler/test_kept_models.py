"""A scheduler without `--scale-to-zero` removes what others have kept known, unless one that keeps it is there."""

from __future__ import annotations

from typing import Any, cast

import pytest
from collecting_bus import CollectingBus

from bus.connection import Bus
from scheduler import queue_keeper
from scheduler.queue_keeper import QueueKeeper
from schemas.presence import RoleRecord


class Service:
    """Stands for the scheduler's service and for its memory of models."""

    owned_queues: list[Any] = []  # noqa: RUF012 - never changed

    def __init__(self) -> None:
        self.memory = self
        self.is_on = False
        self.abolished = 0

    async def abolish(self) -> None:
        self.abolished += 1


def scheduler(id: str, keeps_models: bool) -> RoleRecord:
    return RoleRecord(role="scheduler", id=id, host="h", pid=1, since_ms=1, version="1", keeps_models=keeps_models)


@pytest.mark.parametrize("keeps_models", [True, False])
async def test_known_models_are_removed_by_the_last_who_does_not_keep_them(
    keeps_models: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_keeper, "KEEPERS_PATIENCE_S", 0.0)
    service = Service()
    bus = CollectingBus()
    bus.connections = 1  # type: ignore[attr-defined]
    keeper = QueueKeeper(cast(Bus, bus), "mine", cast(Any, service), cast(Any, None))
    keeper._view.processes = {"mine": scheduler("mine", False), "other": scheduler("other", keeps_models)}
    await keeper._remove_kept_models()
    assert service.abolished == (0 if keeps_models else 1)
    assert keeper._describe()["keeps_models"] is False
