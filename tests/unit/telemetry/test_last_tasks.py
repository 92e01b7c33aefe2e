"""Tasks that lose their cancellation end all the same."""

from __future__ import annotations

import asyncio

import pytest

from telemetry.last_tasks import end_last_tasks


async def test_who_loses_a_cancellation_is_told_again() -> None:
    ended = asyncio.Event()

    async def forgetful() -> None:
        lost = 0
        try:
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    lost += 1
                    if lost == 3:
                        raise
        finally:
            ended.set()

    async with asyncio.TaskGroup() as background:
        background.create_task(forgetful())
        await asyncio.sleep(0)
        await end_last_tasks()
    assert ended.is_set()


async def test_where_nothing_runs_nothing_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    await end_last_tasks()
    assert not caplog.records
