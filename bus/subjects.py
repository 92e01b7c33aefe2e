"""Every subject, stream, bucket and consumer name of Weir, but for durable requests (`bus.durable_subjects`): the only
place they are spelled.

Subjects under `live.`, `event.`, `batch.`, `result.`, `dead.` and `infer.` and the `Weir-*` headers are a public
contract (producers use them); the others are between roles.
"""

from __future__ import annotations

import hashlib
import re

LIVE_STREAM = "LIVE"

REGISTRY_BUCKET = "registry"

SETTINGS_BUCKET = "settings"

MODELS_BUCKET = "models"
MODELS_STREAM = f"KV_{MODELS_BUCKET}"
MODELS_WRITES = f"$KV.{MODELS_BUCKET}.>"
KNOWN_MODELS_BUCKET = "known-models"
KNOWN_MODELS_STREAM = f"KV_{KNOWN_MODELS_BUCKET}"
KNOWN_MODELS_WRITES = f"$KV.{KNOWN_MODELS_BUCKET}.>"
MODEL_FILES_STORE = "model-files"
"""Object store with the files that load requests brought."""
MODEL_FILES_STREAM = f"OBJ_{MODEL_FILES_STORE}"


_PLAIN = re.compile(r"[A-Za-z0-9_-]+")

_MAX_CONSUMER_NAME = 250
"""nats-server takes 255 bytes; a partition's number may follow."""


def token(name: str) -> str:
    """`name` as one subject token: plain names stay, any other byte becomes `=XX` (its hexadecimal value).

    NATS tokens can't hold `.`, ` `, `*`, `>`; keys of a NATS key-value bucket hold only letters, digits and `-/_=.`.
    """
    if _PLAIN.fullmatch(name):
        return name
    return "".join(
        chr(byte) if chr(byte).isascii() and _PLAIN.fullmatch(chr(byte)) else f"={byte:02X}" for byte in name.encode()
    )


def untoken(text: str) -> str:
    """The name that `token` turned into `text`."""
    raw = re.sub(rb"=([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), text.encode())
    return raw.decode(errors="replace")


def queue_token(model: str, partition: int = 0) -> str:
    """One of a model's queues as a subject token (`bus.live_queues`): no model's name turns into that of a partition."""
    return f"{token(model)}=p{partition}" if partition else token(model)


def live(model: str, partition: int = 0, stream: int = 0) -> str:
    """Frames of requests for `model` from gateways, in the stream of this number (`bus.live_layout`)."""
    return f"live.{queue_token(model, partition)}" + (f".s{stream}" if stream else "")


def live_stream(number: int) -> str:
    """Name of one of the streams of frames; the first is LIVE."""
    return f"{LIVE_STREAM}_{number}" if number else LIVE_STREAM


def live_subjects(number: int) -> str:
    """The subjects of frames in that stream."""
    return f"live.*.s{number}" if number else "live.*"


INFER = "infer.*"
"""Requests of NATS clients, by the token of the model; answered on their reply subjects."""

INFER_VERSION = "infer.*.*"
"""The same for one version of the model, `v<number>`."""

INFER_QUEUE = "weir"
"""The queue group in which gateways share those."""


def infer_target(subject: str) -> tuple[str, str]:
    """The model and the version ("": the latest) that a request on `subject` is for."""
    _, model, *more = subject.split(".")
    version = more[0] if more else ""
    return untoken(model), version[1:] if len(version) > 1 and version[0] == "v" else version


def infer_flow(gateway: str) -> str:
    """Where NATS clients acknowledge answers of `gateway`, and nats-server tells that nobody listens; a number follows."""
    return f"flow.{gateway}"


def work(worker: str) -> str:
    """Batches for one worker."""
    return f"work.{worker}"


def reply(gateway: str) -> str:
    """Answers for one gateway."""
    return f"reply.{gateway}"


def publish_ack(gateway: str) -> str:
    """Where JetStream acknowledges a gateway's publishes; the frame's number follows as one more token."""
    return f"ack.{gateway}"


def done(scheduler: str) -> str:
    """Ends of batches, for the scheduler that dispatched them."""
    return f"done.{scheduler}"


def lost(scheduler: str, worker: str) -> str:
    """Reply subject of what `scheduler` sends to `worker`: only nats-server answers on it, when nobody listens."""
    return f"lost.{scheduler}.{worker}"


def inbox(scheduler: str) -> str:
    """Where a scheduler's pulled frames arrive; the model's token follows."""
    return f"inbox.{scheduler}"


def cancel(model: str, partition: int = 0) -> str:
    """Requests for `model` that their gateways have abandoned."""
    return f"cancel.{queue_token(model, partition)}"


def abandoned(worker: str) -> str:
    """Requests of batches of `worker` that their gateways have abandoned."""
    return f"abandoned.{worker}"


def drain(model: str) -> str:
    """Asks the owner of `model` to let a worker go that unloads versions of it; answered on `drained`."""
    return f"drain.{token(model)}"


def drained(worker: str) -> str:
    """Where the owners of models tell `worker` which versions it may unload."""
    return f"drained.{worker}"


def release(owner: str) -> str:
    """Payload slots of `owner` that their reader is done with."""
    return f"release.{owner}"


def fetch(owner: str) -> str:
    """Questions of readers on other hosts for pieces of payloads that lie in the memory of `owner`."""
    return f"fetch.{owner}"


def fetched(reader: str) -> str:
    """Where a reader gets those pieces, or nats-server's word that the owner is gone; the numbers of the fetch and of the
    piece follow as two more tokens.
    """
    return f"fetched.{reader}"


def probe(worker: str) -> str:
    """Probes of a worker's connection: the worker listens and need not answer, nats-server tells when it is gone."""
    return f"probe.{worker}"


HEARTBEATS = "heartbeat.*"


def heartbeat(worker: str) -> str:
    """A worker's sign of life, with the batches it holds."""
    return f"heartbeat.{worker}"


PRESENCE = "presence.*.*"
"""What processes tell of themselves."""

PRESENCE_QUERY = "presence.query"
"""Asks all processes to tell of themselves, on their `presence` subjects."""


def presence(role: str, id: str) -> str:
    """What one process tells of itself (`schemas.presence`), again and again."""
    return f"presence.{role}.{id}"


OWNERS_BUCKET = "queue-owners"
OWNERS_STREAM = f"KV_{OWNERS_BUCKET}"
"""Which scheduler owns which queue of live requests."""

OWNER_WORD = "owner.*"
"""Word of queues that have been taken."""


def owner_word(model: str, partition: int = 0) -> str:
    """Tells who has just taken a queue of `model`, once its record is written."""
    return f"owner.{queue_token(model, partition)}"


def owner_record(model: str, partition: int = 0) -> str:
    """Where it is written who owns a queue of `model`."""
    return f"$KV.{OWNERS_BUCKET}.{queue_token(model, partition)}"


OWNER_RECORDS = f"$KV.{OWNERS_BUCKET}.>"


STATISTICS_QUERY = "statistics.query"
"""Asks every worker and scheduler for its counters, and every gateway that has any; each answers on the reply subject."""

LAST_COUNTERS = "statistics.last"
"""Counters that nobody asked for: of whoever leaves, and of a scheduler or gateway that has come."""


def counters(gateway: str) -> str:
    """Answers to a gateway's `STATISTICS_QUERY`; the number of the round follows as one more token."""
    return f"statistics.answer.{gateway}"


def readiness(worker: str) -> str:
    """Asks `worker` whether a model that has a say in it is ready; answered on the reply subject."""
    return f"readiness.{worker}"


def readiness_answers(asker: str) -> str:
    """Where workers answer `readiness` to one asker; the number of the question follows as one more token."""
    return f"ready.{asker}"


REPOSITORY_QUERY = "repository.query"
"""Asks every worker for the models it sees in its repositories; each answers on the reply subject."""


def repository_answers(gateway: str) -> str:
    """Where workers answer the repository queries of one gateway."""
    return f"repository.{gateway}"


def registry_key(worker: str, model: str | None = None) -> str:
    """Registry key of a worker, or of one of its models."""
    return worker if model is None else f"{worker}.{token(model)}"


def registry_subject(key: str) -> str:
    """Subject on which writes of a registry key are seen."""
    return f"$KV.{REGISTRY_BUCKET}.{key}"


REGIONS_BUCKET = "client-regions"
REGIONS_STREAM = f"KV_{REGIONS_BUCKET}"
"""Shared-memory regions that clients registered, by host: memory is not shared any further."""


def region_key(host: str, name: str) -> str:
    """Key of the region that clients of `host` call `name`."""
    return f"{host}.{token(name) or '='}"


def region_subject(host: str, name: str) -> str:
    """Subject on which writes of a region's key are seen."""
    return f"$KV.{REGIONS_BUCKET}.{region_key(host, name)}"


def region_writes(host: str) -> str:
    """Subjects on which writes of the regions of `host` are seen."""
    return f"$KV.{REGIONS_BUCKET}.{host}.*"


def cuda_open(host: str) -> str:
    """Asks the workers of `host` whether they can use GPU memory that a client shares; each answers."""
    return f"cuda-open.{host}"


def cuda_close(host: str) -> str:
    """Tells the workers of `host` that GPU memory is not shared any more."""
    return f"cuda-close.{host}"


def cuda_opened(gateway: str) -> str:
    """Answers of workers to `cuda_open`; the number of the question follows as one more token."""
    return f"cuda-opened.{gateway}"


def desired_subject(key: str) -> str:
    """Subject on which writes of a key of bucket `models` are seen."""
    return f"$KV.{MODELS_BUCKET}.{key}"


def known_model_subject(key: str) -> str:
    """Subject on which writes of a key of bucket `known-models` are seen."""
    return f"$KV.{KNOWN_MODELS_BUCKET}.{key}"


REGISTRY_WRITES = f"$KV.{REGISTRY_BUCKET}.>"


STATES_BUCKET = "sequence-states"
STATES_STREAM = f"KV_{STATES_BUCKET}"
"""Checkpoints of the states of sequences."""

STATES_PURGE = f"$JS.API.STREAM.PURGE.{STATES_STREAM}"
"""Asks the broker to remove checkpoints."""


def sequence_key(model: str, version: int, scheduler: str, run: int) -> str:
    """What tells a sequence from all others, also from those of the same id: the run that its scheduler numbered."""
    return f"{token(model)}.{version}.{scheduler}.{run}"


def sequence_state(key: str, place: int, piece: int) -> str:
    """Where a piece of one of a sequence's two checkpoints is written."""
    return f"$KV.{STATES_BUCKET}.{key}.{place}.{piece}"


def sequence_states_of(key: str) -> str:
    """All that is written of a sequence's state."""
    return f"$KV.{STATES_BUCKET}.{key}.>"


def settings_key(kind: str, model: str = "") -> str:
    """Key of settings of one kind: those of a model, or ("") those that are nobody's own."""
    return f"{kind}.{token(model)}" if model else kind


def parse_settings_key(key: str) -> tuple[str, str]:
    """(kind, model) of a key of bucket `settings`."""
    kind, _, model = key.partition(".")
    return kind, untoken(model)


def settings_subject(key: str) -> str:
    """Subject on which writes of a settings key are seen."""
    return f"$KV.{SETTINGS_BUCKET}.{key}"


SETTINGS_WRITES = f"$KV.{SETTINGS_BUCKET}.>"


CACHE_BUCKET = "response-cache"
CACHE_STREAM = f"KV_{CACHE_BUCKET}"
"""Answers that gateways and workers share, by the hash of what was asked."""


def cached(key: str) -> str:
    """Subject of a key of the response cache."""
    return f"$KV.{CACHE_BUCKET}.{key}"


def cache_read(key: str) -> str:
    """Asks the broker for what lies under a key of the response cache; it answers on the reply subject."""
    return f"$JS.API.DIRECT.GET.{CACHE_STREAM}.{cached(key)}"


def cache_answers(caller: str) -> str:
    """Where the broker answers `cache_read` of one caller; the number of the question follows as one more token."""
    return f"cached.{caller}"


def role_inbox(role: str) -> str:
    """First token of the subjects on which nats-server and other roles answer this role's connections."""
    return f"_INBOX_{role}"


def live_consumer(model: str, partition: int = 0) -> str:
    """Name of the durable consumer through which the owner of a queue of `model` pulls its frames.

    nats-server takes 255 bytes at most, which a model's namespace may exceed: a digest stands for the rest then.
    """
    return consumer_of("live", model) + (f"=p{partition}" if partition else "")


def consumer_of(lane: str, model: str) -> str:
    """Name of the durable consumer of one lane of `model`."""
    name = f"{lane}-{token(model)}"
    if len(name) <= _MAX_CONSUMER_NAME:
        return name
    return f"{lane}-{hashlib.blake2b(model.encode(), digest_size=32).hexdigest()}"


def repository_bucket(name: str) -> str:
    """Bucket and object store of the model repository `name` that lies in NATS."""
    return f"repository-{name}"


def repository_writes(name: str) -> str:
    """Subjects on which writes of the manifests of a repository are seen, by the token of the model."""
    return f"$KV.{repository_bucket(name)}.*"
