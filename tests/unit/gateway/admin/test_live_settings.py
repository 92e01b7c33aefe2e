"""Trace and log settings: a change is written for all processes before it is returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from weir.bus.kv.settings import LOGGING, TRACE
from weir.calls.tracing import Tracing
from weir.gateway.admin.live_settings import LiveSettings
from weir.schemas.core.errors import WeirError, unavailable
from weir.telemetry.log_settings import LogSettings
from weir.telemetry.logs import RoleLog


class Shared:
    """Settings of a cluster of one: what is written is applied at once, unless the broker is away."""

    def __init__(self) -> None:
        self.apply: dict[str, Callable[[str, bytes], None]] = {}
        self.is_away = False
        self.started = False
        self.values: dict[tuple[str, str], bytes] = {}

    def follow(self, kind: str, apply: Callable[[str, bytes], None]) -> None:
        self.apply[kind] = apply

    async def start(self) -> None:
        self.started = True

    async def change(self, kind: str, model: str, change: Callable[[bytes], bytes]) -> None:
        if self.is_away:
            raise unavailable("the message broker is not available")
        value = self.values[kind, model] = change(self.values.get((kind, model), b""))
        self.apply[kind](model, value)


@pytest.fixture
async def shared() -> Shared:
    return Shared()


@pytest.fixture
async def settings(shared: Shared) -> LiveSettings:
    made = LiveSettings(cast(Any, shared), Tracing(), RoleLog("gateway", LogSettings()))
    await made.start()
    assert shared.apply.keys() == {LOGGING, TRACE}
    return made


async def test_trace_settings_of_a_model_differ_from_the_global_ones(settings: LiveSettings) -> None:
    changed = await settings.change_trace("m", {"trace_rate": 7})
    assert changed["trace_rate"] == "7"
    assert settings.trace("m") == changed
    assert settings.trace()["trace_rate"] != "7"


async def test_log_settings_change_together(settings: LiveSettings) -> None:
    changed = await settings.change_log({"log_verbose_level": 2})
    assert changed["log_verbose_level"] == 2
    assert settings.log() == changed


async def test_without_changes_nothing_is_written(shared: Shared, settings: LiveSettings) -> None:
    shared.is_away = True
    assert await settings.change_trace("", {}) == settings.trace()
    assert await settings.change_log({}) == settings.log()


async def test_a_change_that_others_can_t_get_is_not_made(shared: Shared, settings: LiveSettings) -> None:
    before = settings.log()
    shared.is_away = True
    with pytest.raises(WeirError, match="broker"):
        await settings.change_log({"log_verbose_level": 3})
    assert settings.log() == before
