"""The event loop of a role: its tasks end, and a crash of native code leaves stacks."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from weir.runtime.role_life import cancel_remaining_tasks


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


_CRASHING_ROLE = """
import ctypes
from weir.runtime.role_life import run_role

async def crash_in_native_code(stop, background):
    ctypes.string_at(0)

run_role(crash_in_native_code)
"""


def test_a_crash_of_native_code_leaves_the_stacks_of_the_threads() -> None:
    ended = subprocess.run([sys.executable, "-c", _CRASHING_ROLE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -11
    assert "in crash_in_native_code" in ended.stderr


_ROLE_WHOSE_TIMER_RAISES = """
import asyncio
from weir.runtime.containment import failures
from weir.runtime.role_life import run_role

async def role(stop, background):
    loop = asyncio.get_running_loop()
    loop.call_later(0, int, "no number")
    loop.call_later(0.01, stop.set)
    await stop.wait()
    print(failures())
    return 0

raise SystemExit(run_role(role))
"""


def test_a_timer_that_raises_is_counted_and_logged_and_others_go_on() -> None:
    command = [sys.executable, "-c", _ROLE_WHOSE_TIMER_RAISES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "{'weir.runtime.role_life: a callback of the event loop': 1}\n")
    assert "ValueError" in ended.stderr
