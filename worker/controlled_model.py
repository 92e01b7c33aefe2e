"""`ControlledModel`: the state of one model on this worker, from one load or unload to the next. It does nothing itself.

What serves is in `result`; versions of it that are being unloaded are in `retiring` and still run what they are sent.
Versions that were there before keep a row in `past` that says what became of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from schemas.desired import WantedModel
from schemas.errors import ErrorCode, WeirError, internal
from schemas.registry import UNLOADED, ModelRecord, ModelState, VersionRecord
from worker.model_loader import LoadedResult
from worker.override_folder import OverrideFolder
from worker.served_version import ServedVersion


class ControlledModel:
    """See the module.

    `revision` is the last operation carried out, `asked` the last that has come, which was for `wanted`, `in_force` the
    one that made what serves. Operations on the model hold `lock`, `turns` of them do or wait for it. `seen` is what
    the model's folder at `path` looked like when it was last tried; `rejected` says why that could not be loaded while
    what was loaded before serves on. `is_leaving` tells that it is in no repository any more,
    `is_moving` that other workers have it from now on, and `elsewhere` that it is not for this worker, which is no
    failure of it. `name` is the model's identity; `shared_by` are those of a name that is ambiguous, and has no model
    of its own (`worker.shared_names`).
    """

    def __init__(self, name: str, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self.result: LoadedResult | None = None
        self.retiring: set[int] = set()
        self.past: dict[int, VersionRecord] = {}
        self.reason = ""
        self.rejected = ""
        self.path: Path | None = None
        self.folder: OverrideFolder | None = None
        self.is_override = False
        self.seen: object = None
        self.is_leaving = False
        self.is_moving = False
        self.draining: asyncio.Task[None] | None = None
        self.turns = 0
        self.asked = 0
        self.wanted: WantedModel | None = None
        self.revision = 0
        self.in_force = 0
        self.error: WeirError | None = None
        self.elsewhere = False
        self.shared_by: frozenset[str] = frozenset()
        self._clock_ns = clock_ns

    @property
    def served(self) -> dict[int, ServedVersion]:
        """Every loaded version, retiring ones too."""
        return {} if self.result is None else self.result.served

    @property
    def is_serving(self) -> bool:
        """Whether any version is there to stay."""
        return bool(self.served.keys() - self.retiring)

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing to remember of the model."""
        told = self.result or self.retiring or self.past or self.reason or self.draining or self.shared_by
        return not (told or self.seen)

    @property
    def failure(self) -> str:
        """Why the model is not wholly served, "" when it is, or is not for this worker."""
        if self.elsewhere:
            return ""
        return self.reason or next((row.reason for row in self.past.values() if row.reason not in ("", UNLOADED)), "")

    def adopt(self, result: LoadedResult) -> list[ServedVersion]:
        """The model was loaded: returns the versions it replaces. Those it has no longer are retiring from now on."""
        old = self.served
        replaced = [served for number, served in old.items() if result.served.get(number, served) is not served]
        self.retiring = old.keys() - result.served.keys()
        result.served = {**{number: old[number] for number in self.retiring}, **result.served}
        self.result = result
        # What went wrong before is history; what was unloaded stays told.
        self.past = {
            number: row for number, row in self.past.items() if row.reason == UNLOADED and number not in result.served
        }
        self.reason = self.rejected = ""
        self.is_leaving = self.is_moving = self.elsewhere = False
        return replaced

    def reject(self, result: LoadedResult) -> None:
        """The model could not be loaded: what serves goes on."""
        self.past |= {number: row for number, row in result.records.items() if number not in self.served}
        self.elsewhere = result.elsewhere and not self.served
        self.is_moving = self.is_moving and bool(self.served)
        if not self.served:
            self.reason = result.reason
        else:
            self.rejected = result.reason or _first_failure(result)

    def fail(self, error: Exception) -> None:
        """The last operation raised something unexpected: whoever waits for it is told; what serves goes on."""
        reason = f"{ErrorCode.INTERNAL.title}: {type(error).__name__}: {error}"
        self.error = internal(f"load failed for model '{self.name}': {type(error).__name__}: {error}")
        self.revision = max(self.revision, self.asked)
        if self.is_serving:
            self.rejected = reason
        else:
            self.reason = reason

    def retire(self) -> None:
        """Every version is to be unloaded."""
        self.retiring = set(self.served)
        self.reason = self.rejected = ""

    def gone(self, numbers: set[int]) -> None:
        """These versions have been unloaded. Those that were loaded anew meanwhile have not, and may be about to be."""
        gone = numbers - self.served.keys()
        self.retiring -= gone
        for number in gone:
            self.past[number] = VersionRecord(ModelState.UNAVAILABLE, UNLOADED)

    def record(self) -> ModelRecord:
        """What the registry is told."""
        versions = dict(self.past)
        for number in self.retiring:
            versions[number] = VersionRecord(ModelState.UNLOADING, instances=0)
        for number, served in self.served.items():
            state = ModelState.UNLOADING if number in self.retiring else ModelState.READY
            versions[number] = replace(served.record, state=state)
        config = None if self.result is None else self.result.config
        return ModelRecord(
            name=self.name,
            versions=dict(sorted(versions.items())),
            config=None if config is None else config.model_dump(exclude_defaults=True),
            labels={} if self.result is None else self.result.labels,
            reason=self.reason if not versions else "",
            written_ns=self._clock_ns(),
            revision=self.revision,
            in_force=self.in_force if self.is_serving else 0,
            error_code=0 if self.error is None else self.error.code.number,
            error="" if self.error is None else self.error.message,
            rejected=self.rejected if self.is_serving else "",
            namespace="" if self.result is None else self.result.namespace,
            elsewhere=self.elsewhere or self.is_moving,
        )


def _first_failure(result: LoadedResult) -> str:
    """Why the first version that failed did; versions that were given up because of it are not it."""
    return next((row.reason for row in result.records.values() if row.reason not in ("", UNLOADED)), "")
