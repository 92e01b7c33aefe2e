"""`ModelChange`: one change of a model by a client, or by a ramp: who did what, when, and the states before and after."""

from __future__ import annotations

from typing import Any

import msgspec

from weir.schemas.wire.codec import Record
from weir.schemas.wire.model_control import RegisteredFolder

LOAD, UNLOAD, TRAFFIC, RAMP, ROLLBACK = "load", "unload", "traffic", "ramp", "rollback"
"""The kinds of changes."""

RAMP_BEGINS = "ramp of version "
"""How the note of a change begins that begins a ramp. The steps after it are changes of kind `RAMP`."""

MAX_CONFIG_BYTES = 64 * 1024
"""The configuration of a load that a change keeps; a longer one can't be rolled back to."""


class LoadState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a model is loaded, with what replaces its configuration, and how many files replace its folder.

    `is_kept` is False where the configuration was too long to be kept. `registered` is the folder outside of the
    repositories that has the model, None for a model of a repository.
    """

    load: bool = False
    config: str | None = None
    files: int = 0
    is_kept: bool = True
    registered: RegisteredFolder | None = None


class TrafficState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The traffic rule that is set for a model: its weights, none without a rule, and what is sticky."""

    weights: dict[int, float] = msgspec.field(default_factory=dict)
    sticky: str = ""


class ModelChange(Record, frozen=True, omit_defaults=True):
    """One change. `at_ms` is unix time. The states of loading, or of traffic, are None for a change of the other kind.

    `error` says why the change failed, "" for one that succeeded. `undoes` is the number of the change that a rollback
    undid. `note` explains a change of a ramp.
    """

    model: str
    kind: str
    at_ms: int
    by: str = ""
    load_before: LoadState | None = None
    load_after: LoadState | None = None
    traffic_before: TrafficState | None = None
    traffic_after: TrafficState | None = None
    error: str = ""
    undoes: int = 0
    note: str = ""


class NumberedChange(msgspec.Struct, frozen=True):
    """A stored change and its number, which grows with each change of any model."""

    number: int
    change: ModelChange

    def to_dict(self) -> dict[str, Any]:
        """The change as JSON shows it, without what is empty."""
        fields: dict[str, Any] = msgspec.to_builtins(self.change, str_keys=True)
        return {"number": self.number, **fields}


def change_to_undo(changes: list[NumberedChange]) -> NumberedChange | None:
    """The newest of a model's changes, oldest first, that succeeded, undid nothing, and was not undone; None without.

    A ramp with its steps is one change: the one that began it, whose state before is that before the ramp. One that went
    back by itself is undone by that state too.
    """
    heads = _heads(changes)
    undone = {heads[row.change.undoes].number for row in changes if row.change.undoes in heads}
    for row in sorted(changes, key=lambda row: row.number, reverse=True):
        head = heads[row.number]
        if not (head.change.error or head.change.undoes or head.number in undone):
            return head
    return None


def _heads(changes: list[NumberedChange]) -> dict[int, NumberedChange]:
    """Each change by its number: itself, or, for a step of a ramp, the one that began the ramp, if that is kept."""
    heads: dict[int, NumberedChange] = {}
    begun: NumberedChange | None = None
    for row in changes:
        if row.change.kind != RAMP:
            heads[row.number] = row
            begun = row if row.change.note.startswith(RAMP_BEGINS) else begun
        else:
            begun = begun or row
            heads[row.number] = begun
    return heads
