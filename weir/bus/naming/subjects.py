"""Every name of a subject, stream, bucket and consumer, except those of durable requests
(`weir.bus.naming.durable_subjects`).

They are spelled here and nowhere else. Subjects under `live.`, `event.`, `batch.`, `result.`, `dead.` and `infer.` and the
`Weir-*` headers are a public contract with producers; the others are internal.
"""

from __future__ import annotations

import hashlib
import re

LIVE_STREAM = "LIVE"

REGISTRY_BUCKET = "registry"

SETTINGS_BUCKET = "settings"

MODELS_BUCKET = "models"
KNOWN_MODELS_BUCKET = "known-models"
MODEL_FILES_STORE = "model-files"
"""The object store of files that load requests bring."""
MODEL_FILES_STREAM = f"OBJ_{MODEL_FILES_STORE}"


_PLAIN = re.compile(r"[A-Za-z0-9_-]+")

_MAX_CONSUMER_NAME = 250
"""nats-server accepts 255 bytes; a partition's number may follow."""


def token(name: str) -> str:
    """`name` as one subject token: letters, digits, `-` and `_` stay, any other byte becomes `=XX` (hexadecimal).

    NATS tokens can't hold `.`, ` `, `*`, `>`; keys of a NATS key-value bucket hold only letters, digits and `-/_=.`.
    """
    if _PLAIN.fullmatch(name):
        return name
    return "".join(
        chr(byte) if chr(byte).isascii() and _PLAIN.fullmatch(chr(byte)) else f"={byte:02X}" for byte in name.encode()
    )


def untoken(text: str) -> str:
    """The name that `token` encoded as `text`."""
    raw = re.sub(rb"=([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), text.encode())
    return raw.decode(errors="replace")


def queue_token(model: str, partition: int = 0) -> str:
    """A queue of a model as a subject token (`weir.bus.naming.live_queues`), which is the token of no other model."""
    return f"{token(model)}=p{partition}" if partition else token(model)


def live(model: str, partition: int = 0, stream: int = 0) -> str:
    """Frames of requests for `model`, in the stream of this number (`weir.bus.naming.live_queues`)."""
    return f"live.{queue_token(model, partition)}" + (f".s{stream}" if stream else "")


def live_stream(number: int) -> str:
    """The name of one of the streams of frames; the first is LIVE."""
    return f"{LIVE_STREAM}_{number}" if number else LIVE_STREAM


def live_subjects(number: int) -> str:
    """The subjects of frames in one stream."""
    return f"live.*.s{number}" if number else "live.*"


INFER = "infer.*"
"""Requests of NATS clients, by the model's token. Responses go to their reply subjects."""

INFER_VERSION = "infer.*.*"
"""The same for one version of the model, `v<number>`."""


def infer(model: str, version: str = "") -> str:
    """Requests for a model, or for one version of it."""
    return f"infer.{token(model)}.v{version}" if version else f"infer.{token(model)}"


INFER_BY, INFER_VERSION_BY = f"by.*.{INFER}", f"by.*.{INFER_VERSION}"
"""The same as a user of the broker publishes them who is named there; see `publisher`."""


def publisher(subject: str) -> tuple[str, str]:
    """The user of the broker on whose subject a message came ("": a subject of nobody's), and the subject behind that.

    nats-server lets nobody else publish below `by.<user>`, so a subscriber knows who did.
    """
    first, _, rest = subject.partition(".")
    if first != "by":
        return "", subject
    user, _, subject = rest.partition(".")
    return untoken(user), subject


INFER_QUEUE = "weir"
"""The queue group in which gateways share these requests."""


def infer_target(subject: str) -> tuple[str, str]:
    """The model and the version ("": the latest) of a request on `subject`."""
    _, model, *more = subject.split(".")
    version = more[0] if more else ""
    return untoken(model), version[1:] if len(version) > 1 and version[0] == "v" else version


def infer_flow(gateway: str) -> str:
    """Acknowledgements of responses of `gateway` by NATS clients, or "no responders" from nats-server; a number follows."""
    return f"flow.{gateway}"


def infer_flow_by(gateway: str, user: str) -> str:
    """The same of the requests that a user of the broker has published on its own subjects."""
    return f"by.{token(user)}.{infer_flow(gateway)}"


def infer_flow_by_any(gateway: str) -> str:
    """The same of all users."""
    return f"by.*.{infer_flow(gateway)}"


def work(worker: str) -> str:
    """Batches for one worker."""
    return f"work.{worker}"


def reply(gateway: str) -> str:
    """Responses for one gateway."""
    return f"reply.{gateway}"


def publish_ack(gateway: str) -> str:
    """JetStream's acknowledgements of a gateway's publishes; the frame's number follows."""
    return f"ack.{gateway}"


def done(scheduler: str) -> str:
    """Completions of batches, for the scheduler that dispatched them."""
    return f"done.{scheduler}"


def lost(scheduler: str, worker: str) -> str:
    """The reply subject of messages from `scheduler` to `worker`: nats-server replies there for a worker that is gone."""
    return f"lost.{scheduler}.{worker}"


def inbox(scheduler: str) -> str:
    """Frames that a scheduler pulls; the model's token follows."""
    return f"inbox.{scheduler}"


def cancel(model: str, partition: int = 0) -> str:
    """Cancellations by the gateways of requests for `model`."""
    return f"cancel.{queue_token(model, partition)}"


def cancelled(worker: str) -> str:
    """Cancellations of requests in batches of `worker`."""
    return f"abandoned.{worker}"


def drain(model: str) -> str:
    """Requests to the owner of `model` to release a worker that unloads versions of it; the replies come on `drained`."""
    return f"drain.{token(model)}"


def drained(worker: str) -> str:
    """The versions that `worker` may unload, as the owners of models decide."""
    return f"drained.{worker}"


def sequence_query(worker: str) -> str:
    """Queries to `worker` for the sequences of a model that it has started; the replies come on `sequence_reports`."""
    return f"sequences.{worker}"


def sequence_reports(scheduler: str) -> str:
    """Replies to `sequence_query` for one scheduler; the query's number follows."""
    return f"sequence-reports.{scheduler}"


def release(owner: str) -> str:
    """Payload slots of `owner` that a reader has released."""
    return f"release.{owner}"


def fetch(owner: str) -> str:
    """Requests of readers on other hosts for the address at which `owner` serves payloads in its memory."""
    return f"fetch.{owner}"


def fetched(reader: str) -> str:
    """Addresses for a reader, or "no responders" from nats-server; the number of the request follows."""
    return f"fetched.{reader}"


def probe(worker: str) -> str:
    """Probes of the connection of a worker, which subscribes and never replies. nats-server reports when it is gone."""
    return f"probe.{worker}"


HEARTBEATS = "heartbeat.*"


def heartbeat(worker: str) -> str:
    """Heartbeats of a worker, with the batches it holds."""
    return f"heartbeat.{worker}"


PRESENCE = "presence.*.*"
"""Presence records of all processes."""

PRESENCE_QUERY = "presence.query"
"""Requests to all processes to publish their presence records."""


def stored_entry(bucket: str, key: str) -> str:
    """An entry of a bucket, which nats-server publishes once the bucket has stored it. Rejected writes never get there."""
    return f"kv.{bucket}.{key}"


def presence(role: str, id: str) -> str:
    """The presence record of one process (`weir.schemas.wire.registry`), published periodically."""
    return f"presence.{role}.{id}"


OWNERS_BUCKET = "queue-owners"
OWNERS_STREAM = f"KV_{OWNERS_BUCKET}"
"""The bucket that records which scheduler owns which queue of live requests."""

OWNER_ANNOUNCEMENT = "owner.*"
"""Announcements of queues that have a new owner."""


def owner_announcement(model: str, partition: int = 0) -> str:
    """The announcement that a queue of `model` has a new owner, after its record is written."""
    return f"owner.{queue_token(model, partition)}"


OWNER_RECORDS = f"$KV.{OWNERS_BUCKET}.>"


STATISTICS_QUERY = "statistics.query"
"""Queries for counters, to every worker and scheduler and to gateways that have any. Replies go to the reply subject."""

LAST_COUNTERS = "statistics.last"
"""Counters without a query: of processes that leave, and of a scheduler or gateway that has started."""


def counters(gateway: str) -> str:
    """Replies to a `STATISTICS_QUERY` of one process; the number of the query follows."""
    return f"statistics.answer.{gateway}"


def readiness(worker: str) -> str:
    """Queries to `worker` whether a model with `is_ready` is ready."""
    return f"readiness.{worker}"


def readiness_replies(asker: str) -> str:
    """Replies to `readiness` for one process; the query's number follows."""
    return f"ready.{asker}"


REPOSITORY_QUERY = "repository.query"
"""Queries to every worker for the models in its repositories."""


def repository_replies(gateway: str) -> str:
    """Replies to the repository queries of one gateway."""
    return f"repository.{gateway}"


PEER_QUERY = "peers.query"
"""Queries of a gateway to all gateways, which they answer once they have received what was published before."""


def peer_answers(gateway: str) -> str:
    """Answers to the `PEER_QUERY` of one gateway; the query's number follows."""
    return f"peers.answer.{gateway}"


LIMIT_REQUEST = "limits.request"
"""Requests of gateways for tokens of rate limits, to the one gateway that decides."""


def limit_replies(gateway: str) -> str:
    """Replies to the `LIMIT_REQUEST`s of one gateway; the request's number follows."""
    return f"limits.answer.{gateway}"


API_REQUEST = "api.request"
"""Requests to the HTTP API of the gateways, which share them as a queue group (`weir.schemas.wire.gateway_api`)."""

API_QUEUE = "weir-api"


def api_replies(requester: str) -> str:
    """Responses to the `API_REQUEST`s of one process; the request's number follows."""
    return f"api.answer.{requester}"


OBSERVE = "observe.request"
"""Requests of observers to all schedulers, gateways and `weir durable` to report batches and requests."""


def observed(observer: str) -> str:
    """Reports of batches and requests for one observer (`weir.schemas.wire.observation`)."""
    return f"observed.{observer}"


def registry_key(worker: str, model: str | None = None) -> str:
    """The registry key of a worker, or of one of its models."""
    return worker if model is None else f"{worker}.{token(model)}"


def registry_subject(key: str) -> str:
    """The subject of writes of a registry key."""
    return f"$KV.{REGISTRY_BUCKET}.{key}"


REGIONS_BUCKET = "client-regions"
REGIONS_STREAM = f"KV_{REGIONS_BUCKET}"
"""The bucket of shared-memory regions that clients registered, by host."""


def region_key(host: str, name: str) -> str:
    """The key of the region that clients of `host` call `name`."""
    return f"{host}.{token(name) or '='}"


def region_subject(host: str, name: str) -> str:
    """The subject of writes of a region's key."""
    return f"$KV.{REGIONS_BUCKET}.{region_key(host, name)}"


def cuda_open(host: str) -> str:
    """Requests to the workers of `host` to open GPU memory that a client shares; each replies."""
    return f"cuda-open.{host}"


def cuda_close(host: str) -> str:
    """Requests to the workers of `host` to close GPU memory."""
    return f"cuda-close.{host}"


def cuda_opened(gateway: str) -> str:
    """Replies of workers to `cuda_open`; the request's number follows."""
    return f"cuda-opened.{gateway}"


TRAFFIC_BUCKET = "traffic"
"""The bucket of what operators have set for the traffic of models."""

TRAFFIC_COUNTERS = "traffic.counters"
"""Counters of requests by version, of each caller that has models with a traffic rule."""


ACCESS_KEYS_BUCKET = "access_keys"
"""The bucket of the keys of principals: their hashes, roles and times."""


SHADOW_STORE = "shadow-samples"
"""The object store of requests whose copies on another version gave other responses."""


HISTORY_STREAM = "HISTORY"
HISTORY_SUBJECTS = "history.*"
"""The stream of changes of models by clients and ramps."""


def history(model: str) -> str:
    """The changes of one model."""
    return f"history.{token(model)}"


AUDIT_STREAM = "AUDIT"
AUDIT_SUBJECTS = "audit.*"
"""The stream of what principals did and tried to do."""


def audit(door: str) -> str:
    """The audit events of one kind of door: "http", "grpc", …"""
    return f"audit.{token(door)}"


STATES_BUCKET = "sequence-states"
STATES_STREAM = f"KV_{STATES_BUCKET}"
"""The bucket of checkpoints of sequence states."""

STATES_PURGE = f"$JS.API.STREAM.PURGE.{STATES_STREAM}"
"""The API request that removes checkpoints."""


def sequence_key(model: str, version: int, id: int | str, scheduler: str, run: int) -> str:
    """The key of a sequence. The run, a number of the scheduler that started it, separates sequences with the same id."""
    return f"{sequences_key(model, version, id)}.{scheduler}.{run}"


def sequences_key(model: str, version: int, id: int | str) -> str:
    """The first part of the keys of all sequences with this correlation id."""
    kind = "s" if isinstance(id, str) else "i"
    return f"{token(model)}.{version}.{kind}{token(str(id))}"


def sequence_state(key: str, place: int, piece: int) -> str:
    """The subject of a piece of one of a sequence's two checkpoints."""
    return f"$KV.{STATES_BUCKET}.{key}.{place}.{piece}"


def sequence_request(key: str, number: int, every: int) -> str:
    """The subject of the `number`th request of a sequence, if its state was not checkpointed after it.

    The requests since the checkpoint before the last one have subjects of their own.
    """
    return f"$KV.{STATES_BUCKET}.{key}.r{number % (2 * every)}.0"


def sequence_states_of(key: str) -> str:
    """All subjects of a sequence's checkpoints."""
    return f"$KV.{STATES_BUCKET}.{key}.>"


def settings_key(kind: str, model: str = "") -> str:
    """The key of settings of one kind, of a model or ("") global."""
    return f"{kind}.{token(model)}" if model else kind


def parse_settings_key(key: str) -> tuple[str, str]:
    """(kind, model) of a key of bucket `settings`."""
    kind, _, model = key.partition(".")
    return kind, untoken(model)


CACHE_BUCKET = "response-cache"
CACHE_STREAM = f"KV_{CACHE_BUCKET}"
"""The bucket of cached responses that gateways and workers share, by the hash of the request."""


def cached(key: str) -> str:
    """The subject of a key of the response cache."""
    return f"$KV.{CACHE_BUCKET}.{key}"


def cache_read(key: str) -> str:
    """The API request for the value of a key of the response cache."""
    return f"$JS.API.DIRECT.GET.{CACHE_STREAM}.{cached(key)}"


def cache_replies(caller: str) -> str:
    """Responses to `cache_read` for one process; the request's number follows."""
    return f"cached.{caller}"


def role_inbox(role: str) -> str:
    """The first token of the reply subjects of one role's requests."""
    return f"_INBOX_{role}"


def live_consumer(model: str, partition: int = 0) -> str:
    """Name of the durable consumer through which the owner of a queue of `model` pulls its frames.

    nats-server takes 255 bytes at most, which a model's namespace may exceed: a digest stands for the rest then.
    """
    return consumer_of("live", model) + (f"=p{partition}" if partition else "")


def consumer_of(lane: str, model: str) -> str:
    """The name of the durable consumer of one lane of `model`."""
    name = f"{lane}-{token(model)}"
    if len(name) <= _MAX_CONSUMER_NAME:
        return name
    return f"{lane}-{hashlib.blake2b(model.encode(), digest_size=32).hexdigest()}"


def repository_bucket(name: str) -> str:
    """The bucket and object store of the model repository `name`."""
    return f"repository-{name}"


def repository_writes(name: str) -> str:
    """The subjects of writes of the manifests of a repository, by the token of the model."""
    return f"$KV.{repository_bucket(name)}.*"
