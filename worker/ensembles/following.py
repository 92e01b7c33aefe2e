"""`EnsembleFollower`: which ensembles this worker has or waits for, and what a change of their models means for them.

An ensemble whose models have gone is taken out, and comes back with them; one whose models were loaded anew with another
configuration is checked again. The registry tells, so it makes no difference which worker has those models.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from repository.dependencies import composing_models, in_namespaces, step_identity
from repository.layout import FoundModel
from repository.loading import config_bytes, read_config
from runtime.containment import contained
from schemas.errors import WeirError
from schemas.model_config import ModelConfig
from schemas.model_identity import plain_name
from worker.inner_calls import InnerCalls

_Signature = tuple[tuple[str, tuple[int, ...], ModelConfig], ...]


class Verdict(Enum):
    """What is to be done about an ensemble."""

    KEEP = auto()
    LOAD = auto()
    WITHDRAW = auto()


class _Followed:
    __slots__ = ("config", "names", "namespace", "override", "signature")

    def __init__(self, config: ModelConfig, namespace: str, override: str | None) -> None:
        self.config = config
        self.names = (
            {step.model_name for step in config.ensemble_scheduling.step} if config.ensemble_scheduling else set()
        )
        self.namespace = namespace
        self.override = override
        self.signature: _Signature | None = None


class EnsembleFollower:
    """See the module. `on_change(name)` is called in the event loop when `verdict` may have something new to say."""

    def __init__(self, calls: InnerCalls, circle: Callable[[ModelConfig, FoundModel], str]) -> None:
        self._calls = calls
        self._circle = circle
        self._followed: dict[str, _Followed] = {}
        self._candidates: dict[str, _Followed] = {}
        self.on_change: Callable[[str], None] = lambda _name: None
        calls.registry.on_model_change(self._on_model_change)
        calls.each_second(self._look_at_all)

    def read(self, found: FoundModel, override: str | None) -> ModelConfig | None:
        """The configuration of what was found, if it is an ensemble's that can be; blocking."""
        try:
            if override is None and (not found.config_file or not _speaks_of_ensembles(found)):
                return None
            config = read_config(found, override).config
        except (WeirError, OSError):
            return None  # loading it tells what is wrong
        return None if config.ensemble_scheduling is None or self._circle(config, found) else config

    def follow(self, found: FoundModel, config: ModelConfig, override: str | None) -> None:
        """Keeps the ensemble that is about to be loaded, until `tried` tells what came of it."""
        self._candidates[found.identity] = _Followed(config, found.namespace, override)
        self._calls.start_to_open()

    def forget(self, name: str) -> None:
        """The model is no ensemble, or not wanted any more."""
        self._candidates.pop(name, None)
        self._followed.pop(name, None)

    def tried(self, name: str, old_one_serves: bool) -> None:
        """The ensemble was loaded, or could not be (`old_one_serves`: so that what was there before goes on).

        With its models as they are now, nothing else would come of trying again.
        """
        candidate = self._candidates.pop(name, None)
        followed = self._followed.get(name) if old_one_serves else candidate
        if followed is not None:
            self._followed[name] = followed
            followed.signature = self._signature(followed)

    def verdict(self, name: str, is_serving: bool) -> Verdict:
        """What is to be done about the ensemble now."""
        followed = self._followed.get(name)
        if followed is None:
            return Verdict.KEEP
        signature = self._signature(followed)
        if signature is None:
            return Verdict.WITHDRAW if is_serving else Verdict.KEEP
        return Verdict.KEEP if signature == followed.signature else Verdict.LOAD

    def withdrawn(self, name: str) -> None:
        """The ensemble has been taken out, and waits for its models."""
        followed = self._followed.get(name)
        if followed is not None:
            followed.signature = None

    def override(self, name: str) -> str | None:
        """The configuration that stands in for that on disk, if any."""
        followed = self._followed.get(name)
        return None if followed is None else followed.override

    def _on_model_change(self, name: str) -> None:
        for ensemble, followed in list(self._followed.items()):
            if plain_name(name) in followed.names:
                self._look_at(ensemble)

    def _look_at_all(self) -> None:
        for ensemble in list(self._followed):
            self._look_at(ensemble)

    @contained()
    def _look_at(self, ensemble: str) -> None:
        self.on_change(ensemble)

    def _signature(self, followed: _Followed) -> _Signature | None:
        """The models it is made of as they are served, None where not all of them are."""
        config = in_namespaces(followed.config, followed.namespace, self._calls.catalog.knows)
        found: list[tuple[str, tuple[int, ...], ModelConfig]] = []
        for name in composing_models(config):
            served = self._calls.catalog.served_model(name)
            if served is None:
                return None
            found.append((name, tuple(served.versions), served.config))
        versions = {name: numbers for name, numbers, _ in found}
        for step in config.ensemble_scheduling.step if config.ensemble_scheduling else ():
            if step.model_version >= 0 and step.model_version not in versions[step_identity(step)]:
                return None
        return tuple(found)


def _speaks_of_ensembles(found: FoundModel) -> bool:
    """Spares nearly all models from being read twice."""
    return b"ensemble" in config_bytes(found)
