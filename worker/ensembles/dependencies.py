"""`DependencyWatcher`: what the state of its composing models means for an ensemble.

An ensemble whose composing models disappear is unloaded until they return; an ensemble whose composing models were reloaded
with another configuration is checked again. The watcher reads the registry, so any worker may serve those models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial

from weir.repository.dependencies import composing_models, resolve_namespaces, step_identity
from weir.repository.layout import FoundModel
from weir.repository.loading import config_bytes, read_config
from weir.runtime.containment import call_each
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.names import plain_name
from weir.worker.backend_api.inference_client import InferenceClient

_Signature = tuple[tuple[str, tuple[int, ...], ModelConfig], ...]


class DependencyAction(Enum):
    """What to do about an ensemble."""

    KEEP = auto()
    LOAD = auto()
    WITHDRAW = auto()


class _Followed:
    """An ensemble and, as `signature`, its composing models at the last attempt to load it."""

    __slots__ = ("config", "names", "namespace", "override", "signature")

    def __init__(self, config: ModelConfig, namespace: str, override: str | None) -> None:
        self.config = config
        self.names = (
            {step.model_name for step in config.ensemble_scheduling.step} if config.ensemble_scheduling else set()
        )
        self.namespace = namespace
        self.override = override
        self.signature: _Signature | None = None


class DependencyWatcher:
    """Watches the composing models of all ensembles that this worker serves or should serve. Runs in the event loop.

    `find_circle` returns the path by which an ensemble contains itself, or "".
    """

    def __init__(self, client: InferenceClient, find_circle: Callable[[ModelConfig, FoundModel], str]) -> None:
        self._client = client
        self._find_circle = find_circle
        self._followed: dict[str, _Followed] = {}
        self._candidates: dict[str, _Followed] = {}
        self._on_change: Callable[[str], None] = lambda _name: None
        client.registry.on_model_change(self._on_model_change)
        client.each_second(self._report_all)

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Calls `listener(name)` when `action` of the ensemble may have changed."""
        self._on_change = listener

    def read(self, found: FoundModel, override: str | None) -> ModelConfig | None:
        """The configuration of what was found if it is a valid ensemble, otherwise None. Blocking."""
        try:
            if override is None and (not found.config_file or not _mentions_ensembles(found)):
                return None
            config = read_config(found, override).config
        except (WeirError, OSError):
            return None  # loading the model reports the error
        return None if config.ensemble_scheduling is None or self._find_circle(config, found) else config

    def follow(self, found: FoundModel, config: ModelConfig, override: str | None) -> None:
        """Remembers an ensemble that is about to be loaded, until `tried` reports the outcome."""
        self._candidates[found.identity] = _Followed(config, found.namespace, override)
        self._client.open_soon()

    def forget(self, name: str) -> None:
        """Stops watching for the model: it is not an ensemble, or not desired any more."""
        self._candidates.pop(name, None)
        self._followed.pop(name, None)

    def keep(self, name: str) -> None:
        """The ensemble is not loaded after all: it is served as it is."""
        self._candidates.pop(name, None)

    def tried(self, name: str, older_one_serves: bool) -> None:
        """Records that the ensemble was loaded, or could not be; `older_one_serves` if an older configuration serves on.

        It is not tried again before its composing models change.
        """
        candidate = self._candidates.pop(name, None)
        followed = self._followed.get(name) if older_one_serves else candidate
        if followed is not None:
            self._followed[name] = followed
            followed.signature = self._signature(followed)

    def action(self, name: str, is_serving: bool) -> DependencyAction:
        """What to do about the ensemble now."""
        followed = self._followed.get(name)
        if followed is None:
            return DependencyAction.KEEP
        signature = self._signature(followed)
        if signature is None:
            return DependencyAction.WITHDRAW if is_serving else DependencyAction.KEEP
        return DependencyAction.KEEP if signature == followed.signature else DependencyAction.LOAD

    def withdrawn(self, name: str) -> None:
        """Records that the ensemble was unloaded and waits for its composing models."""
        followed = self._followed.get(name)
        if followed is not None:
            followed.signature = None

    def override(self, name: str) -> str | None:
        """The configuration that replaces the ensemble's own, if any."""
        followed = self._followed.get(name)
        return None if followed is None else followed.override

    def _on_model_change(self, name: str) -> None:
        self._report(ensemble for ensemble, followed in self._followed.items() if plain_name(name) in followed.names)

    def _report_all(self) -> None:
        self._report(self._followed)

    def _report(self, ensembles: Iterable[str]) -> None:
        listeners = [partial(self._on_change, ensemble) for ensemble in ensembles]
        call_each("weir.worker.ensembles.dependencies: the models of an ensemble", listeners)

    def _signature(self, followed: _Followed) -> _Signature | None:
        """The composing models as they are served, or None if at least one is not."""
        catalog = self._client.catalog
        config = resolve_namespaces(followed.config, followed.namespace, catalog.is_wanted)
        found: list[tuple[str, tuple[int, ...], ModelConfig]] = []
        for name in composing_models(config):
            served = catalog.served_model(name)
            if served is None:
                return None
            found.append((name, tuple(served.versions), served.config))
        versions = {name: numbers for name, numbers, _ in found}
        for step in config.ensemble_scheduling.step if config.ensemble_scheduling else ():
            if step.model_version >= 0 and step.model_version not in versions[step_identity(step)]:
                return None
        return tuple(found)


def _mentions_ensembles(found: FoundModel) -> bool:
    """Whether the configuration may be an ensemble's; avoids parsing nearly all configurations twice."""
    return b"ensemble" in config_bytes(found)
