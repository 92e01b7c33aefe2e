"""Every subject, stream, bucket, consumer and header name of durable requests and jobs: the only place they are spelled.

Subjects under `event.`, `batch.`, `result.` and `dead.` and the `Weir-*` headers are a public contract (docs/events.md).

Records that are posted to URLs have subjects that are the `Weir-Reply-To` of their requests. These are not reserved: every
producer may name a URL, which is checked when the record is posted.
"""

from __future__ import annotations

import base64
import re

from weir.bus.naming.subjects import consumer_of, token, untoken

QUEUE_STREAM = "QUEUE"
QUEUE_SUBJECTS = ("event.*", "event.*.*", "event.*.job.*", "event.*.job.*.*", "batch.*", "batch.*.*")
"""The stream of durable requests, on disk until they have their terminal record."""

RESULT_STREAM = "RESULT"
RESULT_SUBJECTS = "result.>"
"""The stream of terminal records of durable requests."""

DEAD_STREAM = "DEAD"
DEAD_SUBJECTS = "dead.>"
"""The stream of durable requests that failed for good, as they were published."""

LEASES_BUCKET = "leases"
LEASES_STREAM = f"KV_{LEASES_BUCKET}"

SECRETS_BUCKET = "secrets"
"""The bucket of random bytes that only gateways may read."""

JOB_IDS_KEY = "job-ids"
"""Its key with the secret that ids of asynchronous requests are derived from."""

JOBS_BUCKET = "jobs"
"""The bucket of offline jobs: what each does, and its progress."""

REQUEST_OBJECTS = "requests"
"""The object store of request bodies that are larger than a message; `Weir-Object` has their names."""

RESULT_OBJECTS = "results"
"""The object store of responses that are larger than a message."""


_STREAMS = {"event": QUEUE_STREAM, "batch": QUEUE_STREAM, "result": RESULT_STREAM, "dead": DEAD_STREAM}


def stream_of(subject: str) -> str:
    """The stream that stores messages on a subject: a durable stream or that of a bucket; "" for another one."""
    first, _, rest = subject.partition(".")
    return f"KV_{rest.partition('.')[0]}" if first == "$KV" else _STREAMS.get(first, "")


_is_target = re.compile(r"(event|batch)\.[^.]+(\.v[^.]+)?|event\.[^.]+\.job\.[^.]+(\.v[^.]+)?").fullmatch


def event(model: str, version: str = "") -> str:
    """Requests of producers to `model`, or to one version of it."""
    return f"event.{token(model)}.v{version}" if version else f"event.{token(model)}"


def batch(model: str, version: str = "") -> str:
    """The same in the batch lane, which yields to all other requests."""
    return f"batch.{token(model)}.v{version}" if version else f"batch.{token(model)}"


def job_event(model: str, id: str, version: str = "") -> str:
    """Requests with `Prefer: respond-async`, each on a subject of its own, by which it is looked up."""
    return f"event.{token(model)}.job.{token(id)}.v{version}" if version else f"event.{token(model)}.job.{token(id)}"


def durable_target(subject: str) -> tuple[str, str, str]:
    """(first token of the lane, model, version) of a subject in QUEUE; the version is "" for the latest."""
    lane, model, *more = subject.split(".")
    if len(more) == 3 and more[0] == "job":
        del more[:2]
    version = more[0][1:] if len(more) == 1 and len(more[0]) > 1 and more[0][0] == "v" else ""
    return lane, untoken(model), version


def is_durable_target(subject: str) -> bool:
    """Whether a subject in QUEUE is one that requests may be published on."""
    return _is_target(subject) is not None


def canonical(subject: str) -> str:
    """A subject in QUEUE with its model encoded as `token` does. Consumers only have such subjects."""
    lane, model, *more = subject.split(".")
    return ".".join((lane, token(untoken(model)), *more))


def durable_consumer(lane: str, model: str) -> str:
    """The name of the durable consumer with which the owner of `model` pulls a lane ("event" or "batch") of QUEUE."""
    return consumer_of(lane, model)


def durable_filters(lane: str, model: str) -> tuple[str, str]:
    """The subjects of that consumer."""
    return f"{lane}.{token(model)}", f"{lane}.{token(model)}.>"


def result(model: str, id: str) -> str:
    """The subject of the terminal record of a durable request."""
    return f"result.{token(model)}.{token(id)}"


def any_result(id: str) -> str:
    """The same for any model."""
    return f"result.*.{token(id)}"


ANY_JOB = "event.*.job.>"
"""All subjects of `job_event`."""

ANY_RESULT = "result.*.*"
"""All subjects of `result`."""


def any_job_event(id: str, model: str = "") -> tuple[str, str]:
    """`job_event` of any version, and of any model unless one is named."""
    start = f"event.{token(model) if model else '*'}.job.{token(id)}"
    return start, f"{start}.*"


def dead(model: str) -> str:
    """The subject of the dead letters of `model`."""
    return f"dead.{token(model)}"


def stored(role: str) -> str:
    """Acknowledgements of JetStream to an `AckedPublisher`; a number follows."""
    return f"stored.{role}"


def durable_inbox(gateway: str) -> str:
    """Durable requests that a gateway pulls; lane and the model's token follow."""
    return f"durable-inbox.{gateway}"


CANCEL_DURABLE = "durable.cancel"
"""Cancellations of durable requests, after their terminal records are written."""


def lost_attempts(gateway: str) -> str:
    """Requests of `gateway` that were lost with a worker or a process and run again."""
    return f"lost-attempts.{gateway}"


def lease_subject(key: str) -> str:
    """The subject of a lease."""
    return f"$KV.{LEASES_BUCKET}.{key}"


def job_subject(key: str) -> str:
    """The subject of a key of the bucket of offline jobs."""
    return f"$KV.{JOBS_BUCKET}.{key}"


CALLBACK_STREAM = "CALLBACKS"
CALLBACK_SUBJECTS = "callback.>"
CALLBACK_CONSUMER = "callbacks"


def callback(id: str, url: str) -> str:
    """The `Weir-Reply-To` of a request whose terminal record is posted to `url`."""
    return f"callback.{token(id)}.{base64.urlsafe_b64encode(url.encode()).decode()}"


def callback_url(subject: str) -> str:
    """The URL of such a subject. Raises ValueError for another subject."""
    tokens = subject.split(".")
    if len(tokens) != 3:
        raise ValueError("not the subject of a callback")
    return base64.b64decode(tokens[2].encode(), b"-_", validate=True).decode()
