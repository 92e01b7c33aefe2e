"""`ControlledModels`: the models that a worker knows of, and whose turn it is to do something about each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

from runtime.containment import report
from worker.controlled_model import ControlledModel


class ControlledModels:
    """The models of a worker by name. A model without state to remember is removed.

    `on_failure(model)` is awaited in the model's turn after an operation on it raised something unexpected.
    """

    def __init__(self, on_failure: Callable[[ControlledModel], Awaitable[None]]) -> None:
        self._by_name: dict[str, ControlledModel] = {}
        self._on_failure = on_failure

    def __iter__(self) -> Iterator[ControlledModel]:
        return iter(list(self._by_name.values()))

    def find(self, name: str) -> ControlledModel | None:
        """The model, if anything is known of it."""
        return self._by_name.get(name)

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[ControlledModel]:
        """The model, for one operation on it after those that came before.

        An unexpected exception ends the operation, which has failed then, and nothing else: it is not raised again.
        """
        model = self._by_name.setdefault(name, ControlledModel(name))
        model.turns += 1
        try:
            async with model.lock:
                try:
                    yield model
                except Exception as error:  # noqa: BLE001 - one model must not cost another
                    report("worker.controlled_models: an operation on a model", error)
                    model.fail(error)
                    await self._on_failure(model)
        finally:
            model.turns -= 1
            self.drop_if_blank(model)

    def drop_if_blank(self, model: ControlledModel) -> None:
        """Forgets the model if nothing is left of it."""
        if not model.turns and model.is_blank:
            self._by_name.pop(model.name, None)

    def failures(self, names: Iterable[str]) -> dict[str, str]:
        """Why models among these are not wholly served."""
        found = (self._by_name.get(name) for name in names)
        return {model.name: model.failure for model in found if model is not None and model.failure}
