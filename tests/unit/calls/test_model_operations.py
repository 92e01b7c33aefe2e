"""Operations on one model wait for each other, however many there are."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from calls.model_operations import ModelOperations


class NoRegistry:
    """A registry that never changes."""

    def on_model_change(self, _listener: object) -> None:
        pass

    def on_worker_lost(self, _listener: object) -> None:
        pass


async def test_one_after_another_also_when_some_come_while_others_wait() -> None:
    nothing = cast(Any, None)
    operations = ModelOperations(cast(Any, NoRegistry()), nothing, nothing, "explicit")
    running: list[str] = []
    done: list[str] = []

    async def operation(name: str) -> None:
        running.append(name)
        assert running == [name], "two at once"
        for _ in range(3):
            await asyncio.sleep(0)
        running.remove(name)
        done.append(name)

    async def later(name: str, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await operations._run("model", operation(name))

    names = [str(number) for number in range(12)]
    await asyncio.gather(*(later(name, int(name)) for name in names))
    assert done == names
    assert not operations._locks
