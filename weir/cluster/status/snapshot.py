"""`ClusterStatus`: the output of `weir status --json`.

Within one `schema_version` fields may be added, but none is renamed or changes its meaning. docs/status.md has a table of
them, generated from this module. Model names are plain; with namespacing, `namespace` completes them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from weir.schemas.wire.registry import Role

SCHEMA_VERSION: Literal[1] = 1

State = Literal["healthy", "degraded", "down", "unreachable"]
Level = Literal["down", "warning", "note"]
RoleState = Literal["up", "draining", "leaving", "silent"]
Kind = Literal[
    "no gateway",
    "no scheduler",
    "no worker",
    "silent process",
    "leaving",
    "model without worker",
    "scaled to zero",
    "overloaded",
    "repository unreadable",
    "model fails",
    "split version not ready",
    "change rejected",
    "queue without owner",
    "queue with two owners",
    "queue waits",
    "releases differ",
    "stream stores nothing",
    "stream nearly full",
    "stream without leader",
    "replica behind",
    "not synced",
    "sync unknown",
    "dead letters",
]


class Part(BaseModel):
    """Base class of all parts: immutable, rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


LEVELS: dict[Kind, Level] = {
    "no gateway": "down",
    "no scheduler": "down",
    "no worker": "down",
    "silent process": "warning",
    "leaving": "note",
    "model without worker": "warning",
    "scaled to zero": "note",
    "overloaded": "warning",
    "repository unreadable": "warning",
    "model fails": "warning",
    "split version not ready": "warning",
    "change rejected": "warning",
    "queue without owner": "warning",
    "queue with two owners": "warning",
    "queue waits": "warning",
    "releases differ": "warning",
    "stream stores nothing": "warning",
    "stream nearly full": "warning",
    "stream without leader": "warning",
    "replica behind": "warning",
    "not synced": "warning",
    "sync unknown": "note",
    "dead letters": "note",
}
"""How grave a problem is, by its kind. Two kinds are a note where nothing is lost: *no worker* while all models are scaled
to zero, and *replica behind* of a server that is present.
"""

ADVICE: dict[Kind, str] = {
    "no gateway": "start a gateway",
    "no scheduler": "start a scheduler",
    "no worker": "start a worker, unless all models are scaled to zero on purpose",
    "silent process": "check its host and its log; its work runs again elsewhere",
    "leaving": "nothing: the process finishes its work and exits",
    "model without worker": "start a worker that has the model; requests wait for it",
    "scaled to zero": "nothing: with `--scale-to-zero`, requests for the model wait for a worker to be started",
    "overloaded": "start as many workers as the model needs for its load (`NEEDS`)",
    "repository unreadable": "make the folder readable for the worker: in poll mode the next poll finds it, else restart "
    "the worker. Of an object store: restore access; models that were fetched serve on",
    "model fails": "repair the model: the text has the reason, and the worker's log has more",
    "split version not ready": "load the version, or change the traffic rule of the model",
    "change rejected": "repair the model's files: the version loaded before still serves",
    "queue without owner": "start a scheduler, or check why none takes the queue",
    "queue with two owners": "nothing: it resolves itself within seconds; workers reject the earlier owner's batches",
    "queue waits": "add instances, or check whether the model hangs",
    "releases differ": "finish the upgrade",
    "stream stores nothing": "make room on the volume of the NATS server, and restart it; `weir serve` restarts its own",
    "stream nearly full": "find out which requests wait, and start workers for them; a full stream rejects requests",
    "stream without leader": "check the NATS servers",
    "replica behind": "check the NATS servers; a replica that is behind, but present, catches up",
    "not synced": "set `sync_interval: always` at the NATS servers, or accept that a power loss may lose requests",
    "sync unknown": "give the gateways `--nats-monitor`",
    "dead letters": "`weir dead list`, then `weir dead replay` or `weir dead purge`",
}
"""What an operator should do, by the kind of a problem."""


class Problem(Part):
    """A condition that may need attention."""

    level: Level = Field(
        description="`down`: no request is answered, and the state is `down`; `warning`: an operator should act, and the "
        "state is `degraded`; `note`: information"
    )
    kind: Kind = Field(description="the type of the problem")
    about: str = Field(description="the model, process or stream concerned")
    text: str = Field(description="description in one sentence")
    advice: str = Field(default="", description="what to do about it")


class Finding(Part):
    """A problem, or several alike ones in one line."""

    level: Level = Field(description="as in `problems`")
    kind: Kind = Field(description="as in `problems`")
    about: list[str] = Field(description="the models, processes or streams concerned")
    text: str = Field(description="description in one sentence: of several alike problems their number and some names")
    advice: str = Field(default="", description="what to do about it")
    texts: list[str] = Field(default=[], description="the texts of the problems, if there are several")


class Server(Part):
    """One nats-server, as seen by the server that `weir status` is connected to."""

    name: str = Field(description="its `server_name`")
    state: Literal["connected", "current", "behind", "offline"] = Field(
        description="`connected`: this server was queried; otherwise the worst state of its stream replicas"
    )


class Stream(Part):
    """One JetStream stream."""

    name: str = Field(description="its name; buckets begin with `KV_`, object stores with `OBJ_`")
    storage: str = Field(description="`memory` or `file`")
    messages: int = Field(description="number of stored messages")
    bytes: int = Field(description="size of the stored messages in bytes")
    max_bytes: int = Field(description="size limit in bytes; -1: no limit")
    replicas: int = Field(description="configured number of replicas")
    leader: str = Field(description="its leader; empty without a cluster, or while no leader is elected")
    behind: list[str] = Field(description="servers whose replica is offline or not current")


class Broker(Part):
    """The NATS server, or cluster."""

    url: str = Field(description="its URL without credentials")
    version: str = Field(description="version of the server that was queried")
    cluster: str = Field(description="name of the cluster; empty for a single server")
    servers: list[Server] = Field(description="the known servers")
    durability: Literal["yes", "no", "unknown"] = Field(
        description="whether a durable request is on disk once it is acknowledged, as determined by the gateways"
    )
    stalled: list[str] = Field(
        default=[], description="streams that acknowledge nothing, as gateways and `weir durable` determined"
    )
    streams: list[Stream] = Field(description="all streams, by name")


class Host(Part):
    """A host: a group of processes that share memory."""

    id: str = Field(description="its unique id")
    name: str = Field(description="its host name")
    gateways: int = Field(description="number of gateways that replied")
    schedulers: int = Field(description="number of schedulers that replied")
    workers: int = Field(description="number of workers that replied")
    instances: int = Field(description="number of model instances that those workers report")
    busy: int = Field(description="number of those instances that are executing a batch")
    utilization: float | None = Field(
        description="share of the last seconds in which the instances were busy, 0 to 1; null: not reported"
    )


class RoleStatus(Part):
    """One process."""

    role: Role = Field(description="`gateway`, `durable`, `scheduler`, `worker` or `console`")
    id: str = Field(description="its unique id on the bus")
    host: str = Field(description="`id` of its host")
    host_name: str = Field(description="its host's name; empty if only the id is known")
    pid: int = Field(description="its process id on that host")
    release: str = Field(description="release of Weir; empty if it runs from a checkout")
    since_ms: int = Field(description="start time (unix time in ms); 0 if unknown")
    state: RoleState = Field(
        description="`draining`: accepts no new work; `leaving`: finishes its work and exits; `silent`: does not reply"
    )
    urls: list[str] = Field(description="URLs of a gateway")
    queues: int = Field(description="number of queues that a scheduler owns")
    loop_lag_s: float = Field(
        default=0.0, description="longest time in the last 10 s for which its event loop was blocked, in seconds"
    )
    unreadable: list[str] = Field(default=[], description="why a worker can't read its model repositories")
    models: int = Field(description="number of models that are ready on a worker")
    instances: int = Field(description="number of instances of all its models")
    batches: int = Field(description="number of batches a worker holds, by its last heartbeat")
    busy: int = Field(description="number of instances of a worker that are executing a batch")
    utilization: float | None = Field(
        description="share of the last seconds in which a worker's instances were busy, 0 to 1; null: not reported"
    )


class VersionStatus(Part):
    """One version of a model, over all workers."""

    version: int = Field(description="its number")
    state: str = Field(description="Triton's state; the best of those that workers report")
    workers: int = Field(description="number of workers on which it is ready")
    instances: int = Field(description="number of ready instances on all workers")
    busy: int = Field(description="number of those instances that are executing a batch")
    reasons: list[str] = Field(description="why it is not ready, or can't run at present, by worker report")
    weight: float | None = Field(
        default=None, description="its weight in the model's traffic rule; null: there is no rule"
    )
    share: float | None = Field(
        default=None,
        description="share of the requests without a version that it gets now, 0 to 1; null: there is no rule",
    )


class ModelStatus(Part):
    """One model that is served, or for which requests wait."""

    name: str = Field(description="its name")
    namespace: str = Field(description="its namespace; empty without namespacing")
    versions: list[VersionStatus] = Field(description="its versions, by number")
    workers: list[str] = Field(description="workers on which a version of it is ready")
    reasons: list[str] = Field(description="why workers serve no version of it")
    rejected: list[str] = Field(
        default=[],
        description="why its changed files could not be loaded, while workers still serve the version loaded before",
    )
    scaled_to_zero: bool = Field(
        description="no worker serves it, but its requests are accepted and wait (`--scale-to-zero`)"
    )
    utilization: float | None = Field(
        description="share of the last seconds in which its instances were busy, 0 to 1; null: not reported"
    )
    desired_workers: int | None = Field(description="number of workers that its load needs; null: not reported")


class Lane(Part):
    """Requests of one lane that wait in a scheduler."""

    depth: int = Field(description="number of requests that have not started executing")
    oldest_s: float = Field(description="age of the oldest waiting request in seconds; 0: none waits")


class CallerStatus(Part):
    """What a tenant or a principal of the access policy has at a queue."""

    name: str = Field(description="the tenant or the principal, as refusals name it")
    in_flight: int = Field(description="number of its live requests that wait or run")
    refused: int = Field(description="number of its requests refused beyond its limit since the queue has this owner")


class QueueStatus(Part):
    """The queue of live requests of a model, or of one of its partitions."""

    model: str = Field(description="its model")
    namespace: str = Field(description="namespace of the model")
    partition: int = Field(description="number of the model's partition; 0 if it has only one")
    owner: str = Field(description="the scheduler that owns it; empty: no replying scheduler does")
    epoch: int = Field(description="epoch of the ownership; grows with each change of owner")
    claims: list[str] = Field(description="all schedulers that claim to own it")
    frames: int = Field(description="number of unacknowledged messages in the stream, including running requests")
    lanes: dict[str, Lane] = Field(
        description="waiting requests by lane (`live`, `event`, `batch`), if the owner reports them"
    )
    callers: list[CallerStatus] = Field(
        default=[], description="with an access policy those with most requests in flight, at most 100"
    )


class DurableQueue(Part):
    """Durable requests of one model and lane that have not ended."""

    model: str = Field(description="its model")
    namespace: str = Field(description="namespace of the model")
    lane: str = Field(description="`event` or `batch`")
    waiting: int = Field(description="number of requests that no gateway has fetched")
    taken: int = Field(description="number of requests that a gateway has fetched and not finished")


class DeadLetters(Part):
    """Dead-lettered durable requests of one model."""

    model: str = Field(description="the model")
    namespace: str = Field(description="namespace of the model")
    letters: int = Field(description="number of dead letters")


class ClusterStatus(Part):
    """The state of a cluster at one point in time, as `weir status --json` prints it."""

    schema_version: Literal[1] = Field(default=SCHEMA_VERSION, description="version of this format")
    taken_ms: int = Field(description="time of the collection (unix time in ms)")
    state: State = Field(
        description="`degraded`: there is a warning; `down`: no request is answered; `unreachable`: the broker does not "
        "reply"
    )
    error: str = Field(default="", description="why the broker is unreachable")
    problems: list[Problem] = Field(default=[], description="problems, the gravest first")
    findings: list[Finding] = Field(default=[], description="the problems, with alike ones in one line")
    broker: Broker | None = Field(default=None, description="null if it is unreachable")
    hosts: list[Host] = Field(default=[], description="hosts of the processes that replied")
    roles: list[RoleStatus] = Field(default=[], description="processes, by host and role")
    models: list[ModelStatus] = Field(default=[], description="models, by name")
    queues: list[QueueStatus] = Field(default=[], description="queues of live requests, by model and partition")
    durable: list[DurableQueue] = Field(default=[], description="unfinished durable requests by model and lane")
    dead: list[DeadLetters] = Field(default=[], description="dead letters by model")
