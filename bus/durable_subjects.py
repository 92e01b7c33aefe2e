"""Every subject, stream, bucket, consumer and header name of durable requests and jobs: the only place they are spelled.

Subjects under `event.`, `batch.`, `result.` and `dead.` and the `Weir-*` headers are a public contract (docs/events.md).
"""

from __future__ import annotations

import re

from bus.subjects import consumer_of, token, untoken

QUEUE_STREAM = "QUEUE"
QUEUE_SUBJECTS = ("event.*", "event.*.*", "event.*.job.*", "event.*.job.*.*", "batch.*", "batch.*.*")
"""Durable requests: on disk until they have their terminal record."""

RESULT_STREAM = "RESULT"
RESULT_SUBJECTS = "result.>"
"""Terminal records of durable requests."""

DEAD_STREAM = "DEAD"
DEAD_SUBJECTS = "dead.>"
"""Durable requests that could not be done, as they were sent."""

LEASES_BUCKET = "leases"
LEASES_STREAM = f"KV_{LEASES_BUCKET}"

SECRETS_STREAM = "KV_secrets"
"""Random bytes that only gateways may read."""

JOB_IDS_KEY = "job-ids"
"""The key, in that bucket, of what ids of requests that are answered later are made with."""

JOBS_BUCKET = "jobs"
"""Offline jobs: what is wanted of each, and how far it is."""

REQUEST_OBJECTS = "requests"
"""Object store of bodies of durable requests that are larger than a message; their names are in `Weir-Object`."""

RESULT_OBJECTS = "results"
"""Object store of answers that are larger than a message."""


_is_target = re.compile(r"(event|batch)\.[^.]+(\.v[^.]+)?|event\.[^.]+\.job\.[^.]+(\.v[^.]+)?").fullmatch


def event(model: str, version: str = "") -> str:
    """Where producers publish requests to `model`, or to this version of it."""
    return f"event.{token(model)}.v{version}" if version else f"event.{token(model)}"


def batch(model: str, version: str = "") -> str:
    """The same for offline work, which yields to all other."""
    return f"batch.{token(model)}.v{version}" if version else f"batch.{token(model)}"


def job_event(model: str, id: str, version: str = "") -> str:
    """Where gateways publish what is asked with `Prefer: respond-async`: a subject of its own, by which it is found."""
    return f"event.{token(model)}.job.{token(id)}.v{version}" if version else f"event.{token(model)}.job.{token(id)}"


def durable_target(subject: str) -> tuple[str, str, str]:
    """(lane's first token, model, version) of a subject in QUEUE; the version is "" for the latest."""
    lane, model, *more = subject.split(".")
    if len(more) == 3 and more[0] == "job":
        del more[:2]
    version = more[0][1:] if len(more) == 1 and len(more[0]) > 1 and more[0][0] == "v" else ""
    return lane, untoken(model), version


def is_durable_target(subject: str) -> bool:
    """Whether a subject in QUEUE is one on which requests are published."""
    return _is_target(subject) is not None


def canonical(subject: str) -> str:
    """A subject in QUEUE with its model written as `token` writes it: under another name nobody looks for it."""
    lane, model, *more = subject.split(".")
    return ".".join((lane, token(untoken(model)), *more))


def durable_consumer(lane: str, model: str) -> str:
    """Name of the durable consumer through which the owner of `model` pulls a lane ("event" or "batch") of QUEUE."""
    return consumer_of(lane, model)


def durable_filters(lane: str, model: str) -> tuple[str, str]:
    """The subjects of that consumer."""
    return f"{lane}.{token(model)}", f"{lane}.{token(model)}.>"


def result(model: str, id: str) -> str:
    """Where the terminal record of a durable request is stored."""
    return f"result.{token(model)}.{token(id)}"


def any_result(id: str) -> str:
    """The same, whatever the model."""
    return f"result.*.{token(id)}"


ANY_JOB = "event.*.job.>"
"""Every subject of `job_event`."""


def any_job_event(id: str, model: str = "") -> tuple[str, str]:
    """`job_event`, of any version, and of any model unless one is named."""
    start = f"event.{token(model) if model else '*'}.job.{token(id)}"
    return start, f"{start}.*"


def dead(model: str) -> str:
    """Where a durable request to `model` is stored that could not be done."""
    return f"dead.{token(model)}"


def found(role: str) -> str:
    """Where JetStream answers what a role asks of stored messages; a number follows as one more token."""
    return f"found.{role}"


def stored(role: str) -> str:
    """Where JetStream acknowledges what a role stores by `AckedPublisher`; a number follows as one more token."""
    return f"stored.{role}"


def durable_inbox(gateway: str) -> str:
    """Where a gateway's pulled durable requests arrive; lane and the model's token follow."""
    return f"durable-inbox.{gateway}"


CANCEL_DURABLE = "durable.cancel"
"""Tells the owner of a model that a durable request was cancelled: its terminal record is there already."""


def lost_attempts(gateway: str) -> str:
    """Tells `gateway` which of its requests were lost with a worker or a process, and are done again."""
    return f"lost-attempts.{gateway}"


def lease_subject(key: str) -> str:
    """Subject on which writes of a lease are seen."""
    return f"$KV.{LEASES_BUCKET}.{key}"


def secret(key: str) -> str:
    """Where a secret of the gateways is stored."""
    return f"$KV.secrets.{key}"


def job_subject(key: str) -> str:
    """Subject on which writes of a key of the bucket of offline jobs are seen."""
    return f"$KV.{JOBS_BUCKET}.{key}"
