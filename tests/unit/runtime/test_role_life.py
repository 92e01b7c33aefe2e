"""Tasks that lose their cancellation end all the same."""

from __future__ import annotations

import asyncio

import pytest

from runtime.role_life import cancel_remaining_tasks


async def test_a_task_that_loses_its_cancellation_is_cancelled_again() -> None:
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
        await cancel_remaining_tasks()
    assert ended.is_set()


async def test_a_release_without_batches_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    await cancel_remaining_tasks()
    assert not caplog.records
