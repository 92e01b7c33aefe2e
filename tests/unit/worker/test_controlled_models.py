"""Turns of models: what one operation raises is its own model's failure."""

from __future__ import annotations

import asyncio

from worker.controlled_model import ControlledModel
from worker.controlled_models import ControlledModels


async def test_an_operation_that_raises_ends_alone() -> None:
    told: list[str] = []

    async def tell(model: ControlledModel) -> None:
        told.append(f"{model.name}: {model.reason}")

    models = ControlledModels(tell)

    async def operate(name: str) -> str:
        async with models.turn(name):
            if name == "broken":
                raise RuntimeError("oops")
        return name

    assert await asyncio.gather(*map(operate, ("good", "broken", "other"))) == ["good", "broken", "other"]
    assert told == ["broken: Internal: RuntimeError: oops"]
    assert models.failures(["good", "broken"]) == {"broken": "Internal: RuntimeError: oops"}
    async with models.turn("broken") as model:
        assert model.reason, "the next operation has its turn"
