"""The state of one model over loads, failed loads and unloads, as the registry is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from schemas.errors import invalid
from schemas.model_config import ModelConfig
from schemas.registry import UNLOADED, ModelState, VersionRecord
from worker.controlled_model import ControlledModel
from worker.model_loader import LoadedResult

LOADING, READY, UNLOADING, UNAVAILABLE = ModelState


@dataclass(eq=False)
class Version:
    """Stands for a loaded version: as many instances as are asked for."""

    instances: list[Any] = field(default_factory=lambda: [None, None])

    @property
    def record(self) -> VersionRecord:
        return VersionRecord(READY, instances=len(self.instances), load_duration_s=1.5)


def loaded(*numbers: int, **kept: Version) -> LoadedResult:
    served: dict[int, Any] = {number: Version() for number in numbers} | {int(n[1:]): v for n, v in kept.items()}
    return LoadedResult("m", ModelConfig(name="m"), served=served)


def failed(number: int) -> LoadedResult:
    return LoadedResult("m", records={number: VersionRecord(UNAVAILABLE, "Internal: no")}, error=invalid("no"))


def model() -> ControlledModel:
    return ControlledModel("m", clock_ns=lambda: 5)


def states(m: ControlledModel) -> dict[int, tuple[ModelState, str, int]]:
    return {number: (row.state, row.reason, row.instances) for number, row in m.record().versions.items()}


def test_a_model_that_was_never_loaded_is_blank():
    m = model()
    assert m.is_blank
    assert (m.record().versions, m.record().config, m.failure) == ({}, None, "")


def test_a_reload_replaces_versions_keeps_those_that_are_the_same_and_retires_the_rest():
    m = model()
    first = loaded(1, 2, 3)
    assert m.adopt(first) == []
    old = dict(first.served)
    assert m.adopt(loaded(3, 4, v2=old[2])) == [old[3]]
    assert states(m) == {1: (UNLOADING, "", 2), 2: (READY, "", 2), 3: (READY, "", 2), 4: (READY, "", 2)}
    assert m.served[1] is old[1]
    del m.served[1]
    assert states(m)[1] == (UNLOADING, "", 0)
    m.gone({1})
    assert states(m)[1] == (UNAVAILABLE, UNLOADED, 0)
    assert m.failure == ""


def test_a_failed_reload_leaves_what_serves():
    m = model()
    m.adopt(loaded(1))
    m.reject(failed(1))
    m.error = invalid("why")
    assert states(m) == {1: (READY, "", 2)}
    assert (m.record().error_code, m.record().error) == (4, "why")
    m.reject(failed(2))
    assert states(m)[2] == (UNAVAILABLE, "Internal: no", 0)
    assert m.failure == "Internal: no"
    m.adopt(loaded(1))
    assert list(states(m)) == [1], "what went wrong before is history"


def test_an_unload_ends_with_rows_that_keep_nobody_from_being_ready():
    m = model()
    m.adopt(loaded(1, 2))
    m.in_force = 9
    m.retire()
    assert not m.is_serving
    assert m.record().in_force == 0
    assert {state for state, _, _ in states(m).values()} == {UNLOADING}
    m.served.clear()
    m.gone({1, 2})
    assert states(m) == {1: (UNAVAILABLE, UNLOADED, 0), 2: (UNAVAILABLE, UNLOADED, 0)}


def test_a_load_overtakes_an_unload():
    m = model()
    m.adopt(loaded(1))
    m.retire()
    (replaced,) = m.adopt(loaded(1))
    assert m.served[1] is not replaced
    assert states(m) == {1: (READY, "", 2)}
    m.gone({1})  # the drain that was overtaken ends
    assert states(m) == {1: (READY, "", 2)}


def test_an_unload_that_ends_late_leaves_what_is_being_unloaded_again():
    m = model()
    m.adopt(loaded(1))
    m.retire()
    m.served.clear()
    m.result = None
    m.adopt(loaded(1))
    m.retire()
    m.gone({1})  # the first
    assert {state for state, _, _ in states(m).values()} == {UNLOADING}
    m.served.clear()
    m.gone({1})
    assert states(m) == {1: (UNAVAILABLE, UNLOADED, 0)}


def test_a_model_that_moves_is_not_given_up_by_who_unloads_it():
    m = model()
    m.adopt(loaded(1))
    m.is_moving = True
    m.retire()
    assert m.record().elsewhere
    m.served.clear()
    m.gone({1})
    m.reject(failed(1))
    assert not m.record().elsewhere, "what fails here later is a failure"


def test_a_rejected_change_is_told_until_a_load_succeeds() -> None:
    m = model()
    m.reject(failed(1))
    assert m.record().rejected == "", "nothing serves: it is the reason of the version"
    m.adopt(loaded(1))
    m.reject(failed(1))
    assert m.record().rejected == "Internal: no"
    assert states(m) == {1: (READY, "", 2)}
    m.adopt(loaded(1))
    assert m.record().rejected == ""


def test_an_operation_that_raises_has_failed_and_what_serves_goes_on() -> None:
    m = model()
    m.asked = 7
    m.fail(RuntimeError("oops"))
    assert (m.record().reason, m.record().revision) == ("Internal: RuntimeError: oops", 7)
    assert m.record().error == "load failed for model 'm': RuntimeError: oops"
    m.adopt(loaded(1))
    m.fail(RuntimeError("oops"))
    assert states(m) == {1: (READY, "", 2)}
    assert m.record().rejected == "Internal: RuntimeError: oops"
