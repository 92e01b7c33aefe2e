"""How the payload of a message on Weir's bus is decoded, by its subject: as its receivers do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from weir.schemas.wire.history import ModelChange
from weir.schemas.wire.messages import (
    BatchMessage,
    Cancellation,
    QueueOwner,
    RunningCancellation,
    SequenceQuery,
    SequenceReport,
    SlotRelease,
    unpack_completions,
    unpack_frame,
    unpack_responses,
)
from weir.schemas.wire.model_control import DesiredModel, DrainMessage, ReadinessQuery, ReadinessReply, RepositoryView
from weir.schemas.wire.registry import Heartbeat, ModelRecord, RoleRecord, WorkerRecord
from weir.schemas.wire.request_body import is_body_ref, unpack_body
from weir.schemas.wire.statistics import unpack_counters

Decode = Callable[[bytes], Any]


def _frame(data: bytes) -> Any:
    problems: list[Any] = []
    gateway, envelopes = unpack_frame(data, lambda *problem: problems.append(problem))
    assert not problems, problems
    assert envelopes
    return gateway, [(one.key, _body(one.body)) for one in envelopes]


def _batch(data: bytes) -> Any:
    batch = BatchMessage.unpack(data)
    assert batch.entries
    return batch.batch_id, [(one.key, _body(one.body)) for one in batch.entries]


def _body(body: bytes) -> Any:
    return body if is_body_ref(body) else unpack_body(body, "m", 1)


def _responses(data: bytes) -> Any:
    problems: list[Any] = []
    found = unpack_responses(data, lambda *problem: problems.append(problem))
    assert not problems, problems
    assert found[1]
    return found


def _completions(data: bytes) -> Any:
    problems: list[Any] = []
    found = unpack_completions(data, lambda *problem: problems.append(problem))
    assert not problems, problems
    return found


DECODERS: dict[str, Decode] = {
    r"live\..+": _frame,
    r"work\..+": _batch,
    r"reply\..+": _responses,
    r"done\..+": _completions,
    r"cancel\..+": Cancellation.unpack,
    r"abandoned\..+": RunningCancellation.unpack,
    r"release\..+": SlotRelease.unpack,
    r"heartbeat\..+": Heartbeat.unpack,
    r"presence\.(gateway|scheduler|worker)\..+": RoleRecord.unpack,
    r"drain\..+": DrainMessage.unpack,
    r"drained\..+": DrainMessage.unpack,
    r"sequences\..+": SequenceQuery.unpack,
    r"sequence-reports\..+": SequenceReport.unpack,
    r"owner\..+": QueueOwner.unpack,
    r"\$KV\.queue-owners\..+": QueueOwner.unpack,
    r"\$KV\.registry\.[^.]+": WorkerRecord.unpack,
    r"\$KV\.registry\.[^.]+\..+": ModelRecord.unpack,
    r"\$KV\.models\..+": DesiredModel.unpack,
    r"statistics\.(answer\..+|last)": unpack_counters,
    r"readiness\..+": ReadinessQuery.unpack,
    r"ready\..+": ReadinessReply.unpack,
    r"repository\.(?!query).+": RepositoryView.unpack,
    r"history\..+": ModelChange.unpack,
}
"""A decoder raises an error, of whatever kind, for a message that it does not understand. Keys match whole subjects."""


def kind_of(subject: str) -> str | None:
    """The key in `DECODERS` for a subject; None for those that carry no message of Weir's own format."""
    return next((kind for kind in DECODERS if re.fullmatch(kind, subject)), None)
