"""`ClusterStatus`: what `weir status --json` prints. Fields are added, and none is renamed or gets another meaning, as long
as `schema_version` is the same; docs/status.md has their table, made from here.

Names of models are plain; where namespaces are in use, `namespace` tells the rest.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.presence import Role

SCHEMA_VERSION: Literal[1] = 1

State = Literal["healthy", "degraded", "unreachable"]
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
    "change rejected",
    "queue without owner",
    "queue with two owners",
    "queue waits",
    "releases differ",
    "stream nearly full",
    "stream without leader",
    "replica behind",
    "not synced",
    "sync unknown",
    "dead letters",
]


class Part(BaseModel):
    """Base of all: what it holds is never changed, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Problem(Part):
    """Something that is not as it should be."""

    level: Literal["warning", "note"] = Field(description="a `warning` needs a human and makes the state `degraded`")
    kind: Kind = Field(description="which of the known problems it is")
    about: str = Field(description="the model, queue, process or stream in question")
    text: str = Field(description="one sentence for people")


class Server(Part):
    """One nats-server, as far as the one that was asked knows."""

    name: str = Field(description="its `server_name`")
    state: Literal["connected", "current", "behind", "offline"] = Field(
        description="`connected`: the one that was asked; else by the worst of the replicas it holds"
    )


class Stream(Part):
    """One JetStream stream."""

    name: str = Field(description="its name; those of buckets begin with `KV_`, of object stores with `OBJ_`")
    storage: str = Field(description="`memory` or `file`")
    messages: int = Field(description="messages it holds")
    bytes: int = Field(description="bytes it holds")
    max_bytes: int = Field(description="bytes it may hold; -1: no limit of its own")
    replicas: int = Field(description="copies it is to have")
    leader: str = Field(
        description="the server that leads it; empty without a cluster, or where there is none just now"
    )
    behind: list[str] = Field(description="servers whose copy is offline or not current")


class Broker(Part):
    """The NATS server, or cluster."""

    url: str = Field(description="where it was asked, without credentials")
    version: str = Field(description="release of the server that was asked")
    cluster: str = Field(description="name of the cluster; empty for a server alone")
    servers: list[Server] = Field(description="the servers that are known")
    durability: Literal["yes", "no", "unknown"] = Field(
        description="whether an acknowledgement says that a durable request is on disk, as the gateways found out"
    )
    streams: list[Stream] = Field(description="all streams, by name")


class Host(Part):
    """A place whose processes share memory."""

    id: str = Field(description="what tells it from others")
    name: str = Field(description="its name for people")
    gateways: int = Field(description="gateways there that are heard")
    schedulers: int = Field(description="schedulers there that are heard")
    workers: int = Field(description="workers there that are heard")
    instances: int = Field(description="instances of those workers, as they tell")
    busy: int = Field(description="those of them that hold a batch")
    utilization: float | None = Field(
        description="share of the last seconds in which they were busy, 0 to 1; null where nobody tells"
    )


class RoleStatus(Part):
    """One process."""

    role: Role = Field(description="`gateway`, `scheduler` or `worker`")
    id: str = Field(description="its name on the bus")
    host: str = Field(description="`id` of its host")
    host_name: str = Field(description="its host's name for people; empty where only its id is known")
    pid: int = Field(description="its process on that host")
    release: str = Field(description="release of Weir; empty where it runs from a checkout")
    since_ms: int = Field(description="up since (unix time); 0 where it is silent and nobody knows")
    state: RoleState = Field(
        description="`draining`: takes no new work; `leaving`: ends its work; `silent`: known, and does not answer"
    )
    urls: list[str] = Field(description="where a gateway is asked")
    queues: int = Field(description="queues that a scheduler owns")
    loop_lag_s: float = Field(
        default=0.0, description="longest time in the last 10 s for which its event loop served nobody, in seconds"
    )
    unreadable: list[str] = Field(default=[], description="why a worker can't read model repositories of its own")
    models: int = Field(description="models that a worker has ready")
    instances: int = Field(description="instances of all its models")
    batches: int = Field(description="batches that a worker holds, as it told last")
    busy: int = Field(description="instances of a worker that hold a batch")
    utilization: float | None = Field(
        description="share of the last seconds in which a worker's instances were busy, 0 to 1; null: it does not tell"
    )


class VersionStatus(Part):
    """One version of a model, over all workers."""

    version: int = Field(description="its number")
    state: str = Field(description="Triton's state; the best of those that workers tell")
    workers: int = Field(description="workers that have it ready")
    instances: int = Field(description="instances that take batches, of all workers")
    busy: int = Field(description="those of them that hold a batch")
    reasons: list[str] = Field(description="why workers don't have it ready, or can't run it just now")


class ModelStatus(Part):
    """One model that somebody serves, or for which requests wait."""

    name: str = Field(description="its name")
    namespace: str = Field(description="the namespace it lies in; empty without namespacing")
    versions: list[VersionStatus] = Field(description="its versions, by number")
    workers: list[str] = Field(description="workers that have a version of it ready")
    reasons: list[str] = Field(description="why workers have no version of it at all")
    rejected: list[str] = Field(
        default=[],
        description="why its files as they are now could not be loaded, where workers serve what they had loaded before",
    )
    scaled_to_zero: bool = Field(
        description="no worker has it, and it is kept for one that will (`--scale-to-zero`): requests for it wait"
    )
    utilization: float | None = Field(
        description="share of the last seconds in which its instances were busy, 0 to 1; null: no scheduler tells"
    )
    desired_workers: int | None = Field(
        description="workers that it should have for its load; null: no scheduler tells"
    )


class Lane(Part):
    """Requests of one lane that wait in a queue's scheduler."""

    depth: int = Field(description="requests that no instance has begun")
    oldest_s: float = Field(description="age of the oldest in seconds; 0 where none waits")


class QueueStatus(Part):
    """The queue of live requests of a model, or of one of its partitions."""

    model: str = Field(description="its model")
    namespace: str = Field(description="as of the model")
    partition: int = Field(description="which of the model's partitions; 0 where it has one")
    owner: str = Field(description="the scheduler that owns it; empty: none that is heard does")
    epoch: int = Field(description="number of the ownership, which grows with each change")
    claims: list[str] = Field(description="all schedulers that say they own it")
    frames: int = Field(description="messages in the stream that are not done with, those that run included")
    lanes: dict[str, Lane] = Field(description="by lane (`live`, `event`, `batch`), where the owner tells")


class DurableQueue(Part):
    """Durable requests of one model and lane that have no terminal record yet."""

    model: str = Field(description="its model")
    namespace: str = Field(description="as of the model")
    lane: str = Field(description="`event` or `batch`")
    waiting: int = Field(description="those that no gateway has taken")
    taken: int = Field(description="those that its gateway holds or runs")


class DeadLetters(Part):
    """Durable requests that could not be done."""

    model: str = Field(description="their model")
    namespace: str = Field(description="as of the model")
    letters: int = Field(description="how many")


class ClusterStatus(Part):
    """See the module."""

    schema_version: Literal[1] = Field(default=SCHEMA_VERSION, description="of this form")
    taken_ms: int = Field(description="when (unix time)")
    state: State = Field(description="`degraded` with any warning; `unreachable`: no broker answers")
    error: str = Field(default="", description="why it is unreachable")
    problems: list[Problem] = Field(default=[], description="what is not as it should be, the worst first")
    broker: Broker | None = Field(default=None, description="null where it is unreachable")
    hosts: list[Host] = Field(default=[], description="hosts of processes that are heard")
    roles: list[RoleStatus] = Field(default=[], description="processes, by host and role")
    models: list[ModelStatus] = Field(default=[], description="models, by name")
    queues: list[QueueStatus] = Field(default=[], description="queues of live requests, by model and partition")
    durable: list[DurableQueue] = Field(default=[], description="durable requests without an end, where there are any")
    dead: list[DeadLetters] = Field(default=[], description="dead letters, where there are any")
