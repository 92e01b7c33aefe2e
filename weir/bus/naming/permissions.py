"""The subjects that each role may publish on and subscribe to: one table, built from the functions that name subjects.

It is for operators whose nats-server serves other users too, and limits what a compromised role can do: workers run users'
code. `nats_conf` writes it as nats-server's configuration. The rights to JetStream's API are listed stream by stream; there
is no `$JS.API.>` and no `$SYS.>`. Responses to each role come to an inbox of its own (`_INBOX_<role>`), which no other role
may read.
Source: nats-server's configuration (`authorization`, `permissions`); the subjects of JetStream's API.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weir.bus.naming import durable_subjects as callbacks
from weir.bus.naming import durable_subjects as durable
from weir.bus.naming import subjects as live

USERS = ("gateway", "scheduler", "worker", "producer", "admin", "console")
GATEWAY, SCHEDULER, WORKER, PRODUCER, ADMIN, CONSOLE = USERS
"""The users. A producer publishes requests and reads results; `weir status`, `weir top`, `weir dead` and `weir push` are
`admin`; `weir console` is `console`, which may besides use the HTTP API of the gateways over the bus.
"""

ROLES = (GATEWAY, SCHEDULER, WORKER)
OBSERVERS = (ADMIN, CONSOLE)
"""Users that read the state of the cluster, and replay and remove dead letters."""

ALL_USERS = (*ROLES, *OBSERVERS)

_API = "$JS.API"
_DISCOVERY = ("$SRV.*", "$SRV.*.weir", "$SRV.*.weir.*")
_WORD, _NUMBER = "ANYTHING", 987654321


@dataclass(frozen=True, slots=True)
class Permissions:
    """The subjects that one user may publish on, and those it may subscribe to.

    No user has nats-server's `allow_responses`, which lets a role publish on any reply subject, also on one that the
    requester may not publish on.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def anything(name: Callable[..., str]) -> str:
    """The subjects of a function of `weir.bus.naming.subjects` with a wildcard for each argument."""
    numbers = ("int",)
    given = [
        _NUMBER if parameter.annotation in numbers else _WORD
        for parameter in inspect.signature(name).parameters.values()
    ]
    tokens = name(*given).split(".")
    return ".".join("*" if _WORD in token or str(_NUMBER) in token else token for token in tokens)


# Subject, users that publish, users that subscribe.

_MESSAGES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (live.live_subjects(0), (GATEWAY, WORKER), ()),
    (anything(live.live_subjects), (GATEWAY, WORKER), ()),
    (live.INFER, (PRODUCER, CONSOLE), (GATEWAY,)),
    (live.INFER_VERSION, (PRODUCER, CONSOLE), (GATEWAY,)),
    (f"{anything(live.infer_flow)}.*", (PRODUCER, CONSOLE), (GATEWAY,)),
    (anything(live.work), (SCHEDULER,), (WORKER,)),
    (anything(live.reply), (SCHEDULER, WORKER), (GATEWAY, WORKER)),
    (f"{anything(live.publish_ack)}.*", (), (GATEWAY, WORKER)),
    (anything(live.done), (WORKER,), (SCHEDULER,)),
    (anything(live.lost), (), (SCHEDULER,)),
    (f"{anything(live.inbox)}.*", (), (SCHEDULER,)),
    (anything(live.cancel), (GATEWAY, WORKER), (SCHEDULER,)),
    (anything(live.cancelled), (SCHEDULER,), (WORKER,)),
    (anything(live.drain), (WORKER,), (SCHEDULER,)),
    (anything(live.drained), (SCHEDULER,), (WORKER,)),
    (anything(live.sequence_query), (SCHEDULER,), (WORKER,)),
    (f"{anything(live.sequence_reports)}.*", (WORKER,), (SCHEDULER,)),
    (anything(live.release), (GATEWAY, WORKER), (GATEWAY, WORKER)),
    (anything(live.probe), (SCHEDULER,), (SCHEDULER, WORKER)),
    (live.HEARTBEATS, (WORKER,), ALL_USERS),
    *((live.presence(role, "*"), (role,), ()) for role in ROLES),
    (live.presence("durable", "*"), (GATEWAY,), ()),  # `weir durable` connects as a gateway
    (live.presence(CONSOLE, "*"), (CONSOLE,), ()),
    (live.PRESENCE, (), OBSERVERS),
    (live.presence(SCHEDULER, "*"), (), (SCHEDULER,)),
    (live.presence(GATEWAY, "*"), (), (GATEWAY,)),
    (live.PRESENCE_QUERY, (GATEWAY, SCHEDULER, *OBSERVERS), (*ROLES, CONSOLE)),
    (live.PEER_QUERY, (GATEWAY,), (GATEWAY,)),
    (f"{anything(live.peer_answers)}.*", (GATEWAY,), (GATEWAY,)),
    (live.OWNER_ANNOUNCEMENT, (SCHEDULER,), (SCHEDULER, WORKER)),
    (live.STATISTICS_QUERY, (GATEWAY, *OBSERVERS), ROLES),
    (live.LAST_COUNTERS, ROLES, (GATEWAY, *OBSERVERS)),
    (live.TRAFFIC_COUNTERS, (GATEWAY,), (GATEWAY,)),
    (f"{anything(live.counters)}.*", ROLES, (GATEWAY, *OBSERVERS)),
    (live.API_REQUEST, (CONSOLE,), (GATEWAY,)),
    (f"{anything(live.api_replies)}.*", (GATEWAY,), (CONSOLE,)),
    (live.OBSERVE, OBSERVERS, (GATEWAY, SCHEDULER)),
    (anything(live.observed), (GATEWAY, SCHEDULER), OBSERVERS),
    (anything(live.readiness), (GATEWAY, WORKER), (WORKER,)),
    (f"{anything(live.readiness_replies)}.*", (WORKER,), (GATEWAY, WORKER)),
    (live.REPOSITORY_QUERY, (GATEWAY,), (WORKER,)),
    (anything(live.repository_replies), (WORKER,), (GATEWAY,)),
    (anything(live.cuda_open), (GATEWAY,), (WORKER,)),
    (anything(live.cuda_close), (GATEWAY,), (WORKER,)),
    (f"{anything(live.cuda_opened)}.*", (WORKER,), (GATEWAY,)),
    (f"{anything(live.cache_replies)}.*", (), (GATEWAY, WORKER)),
    (anything(live.fetch), (GATEWAY, WORKER), (GATEWAY, WORKER)),
    (f"{anything(live.fetched)}.*.*", (GATEWAY, WORKER), (GATEWAY, WORKER)),
    # Durable requests
    *((subject, (PRODUCER, *OBSERVERS), ()) for subject in ("event.*", "event.*.*", "batch.*", "batch.*.*")),
    (durable.ANY_JOB, (GATEWAY, *OBSERVERS), ()),
    (durable.RESULT_SUBJECTS, (GATEWAY,), (GATEWAY, PRODUCER)),
    (durable.DEAD_SUBJECTS, (GATEWAY,), ()),
    (f"{anything(durable.stored)}.*", (), ALL_USERS),
    (f"{anything(durable.durable_inbox)}.>", (), (GATEWAY,)),
    (durable.CANCEL_DURABLE, (GATEWAY,), (GATEWAY,)),
    (anything(durable.lost_attempts), (SCHEDULER,), (GATEWAY,)),
    (callbacks.CALLBACK_SUBJECTS, (GATEWAY,), ()),
    # Reply subjects of producers
    ("_INBOX.>", (GATEWAY,), (PRODUCER,)),
    ("answers.>", (GATEWAY,), (PRODUCER,)),
    ("answers.console.>", (), (CONSOLE,)),
    *((f"{live.role_inbox(user)}.>", (), (user,)) for user in ALL_USERS),
    *((subject, (PRODUCER,), (GATEWAY,)) for subject in _DISCOVERY),
    # Whether nats-server syncs before it acknowledges: it responds only in the system account.
    ("$SYS.REQ.SERVER.PING.JSZ", (GATEWAY,), ()),
    *(
        (f"$JS.EVENT.ADVISORY.STREAM.{action}.{stream}", (), (GATEWAY,))
        for action in ("DELETED", "UPDATED")
        for stream in (durable.QUEUE_STREAM, durable.RESULT_STREAM, durable.DEAD_STREAM)
    ),
)


# Rights to streams: each name stands for some requests of JetStream's API.

_REQUESTS = {
    "look": ("STREAM.INFO.{}",),
    "make": ("STREAM.INFO.{}", "STREAM.CREATE.{}"),
    "limit": ("STREAM.UPDATE.{}",),
    "read": ("STREAM.INFO.{}", "STREAM.MSG.GET.{}", "DIRECT.GET.{}", "DIRECT.GET.{}.>"),
    # An ephemeral consumer, which the reader creates and removes.
    "follow": (
        "CONSUMER.CREATE.{}",
        "CONSUMER.CREATE.{}.>",
        "CONSUMER.INFO.{}.*",
        "CONSUMER.DELETE.{}.*",
    ),
    "own": (
        "CONSUMER.CREATE.{}.>",
        "CONSUMER.DURABLE.CREATE.{}.*",
        "CONSUMER.INFO.{}.*",
        "CONSUMER.DELETE.{}.*",
        "CONSUMER.NAMES.{}",
        "CONSUMER.LIST.{}",
        "CONSUMER.MSG.NEXT.{}.*",
    ),
    "rewind": ("CONSUMER.RESET.{}.*",),
    "list": ("CONSUMER.LIST.{}",),
    "abolish": ("STREAM.DELETE.{}",),
    "remove": ("STREAM.MSG.DELETE.{}", "STREAM.PURGE.{}"),
}
_ACKS = {"own": "$JS.ACK.{}.>", "ack": "$JS.ACK.{}.>", "follow": "$JS.FC.{}.>"}

_Rights = dict[str, tuple[str, ...]]


def _streams(live_streams: int, repositories: Iterable[str]) -> dict[str, _Rights]:
    made = dict.fromkeys(ROLES, ("make",))
    read: _Rights = dict.fromkeys(ROLES, ("make", "read", "follow"))
    all_live = map(live.live_stream, range(live_streams))
    looks: _Rights = {ADMIN: ("look",)}
    stored = ("make", "read", "follow", "remove")
    followed = ("make", "limit", "read", "follow")
    streams: dict[str, _Rights] = {
        **{
            stream: {
                **made,
                SCHEDULER: ("make", "own", "rewind", "limit"),
                WORKER: ("make", "ack"),
                ADMIN: ("look", "list"),
            }
            for stream in all_live
        },
        f"KV_{live.REGISTRY_BUCKET}": {**read, ADMIN: ("look", "read", "follow")},
        f"KV_{live.SETTINGS_BUCKET}": {**read, GATEWAY: followed, **looks},
        live.MODELS_STREAM: {**read, GATEWAY: followed, ADMIN: ("look", "read", "follow")},
        live.MODEL_FILES_STREAM: {GATEWAY: stored, WORKER: stored, **looks},
        live.REGIONS_STREAM: {GATEWAY: (*stored, "limit"), **looks},
        live.STATES_STREAM: {WORKER: stored, SCHEDULER: ("look", "read"), **looks},
        live.CACHE_STREAM: {GATEWAY: ("make", "read"), WORKER: ("make", "read"), **looks},
        live.OWNERS_STREAM: {SCHEDULER: ("make", "read"), **looks},
        # A scheduler without --scale-to-zero removes what another one has stored.
        live.KNOWN_MODELS_STREAM: {
            SCHEDULER: (*followed, "abolish"),
            GATEWAY: ("read", "follow"),
            ADMIN: ("look", "read", "follow"),
            WORKER: ("read", "follow"),
        },
        live.SHADOW_STREAM: {GATEWAY: stored, **looks},
        live.HISTORY_STREAM: {GATEWAY: ("make", "read", "follow"), ADMIN: ("look", "read", "follow")},
        live.TRAFFIC_STREAM: {GATEWAY: followed, ADMIN: ("look", "read", "follow")},
        durable.QUEUE_STREAM: {
            GATEWAY: ("make", "limit", "read", "own", "rewind", "remove"),
            ADMIN: ("look", "read", "list"),
        },
        durable.RESULT_STREAM: {
            GATEWAY: ("make", "limit", "read", "remove"),
            PRODUCER: ("look", "read", "own", "follow"),
            ADMIN: ("look", "read", "follow"),
        },
        durable.DEAD_STREAM: {GATEWAY: ("make", "limit", "read"), ADMIN: ("look", "read", "own", "follow", "remove")},
        durable.LEASES_STREAM: {GATEWAY: ("make", "read"), **looks},
        durable.SECRETS_STREAM: {GATEWAY: ("make", "read")},
        f"KV_{durable.JOBS_BUCKET}": {GATEWAY: followed, **looks},
        f"OBJ_{durable.REQUEST_OBJECTS}": {GATEWAY: stored, PRODUCER: ("look",), ADMIN: stored},
        f"OBJ_{durable.RESULT_OBJECTS}": {GATEWAY: stored, PRODUCER: ("look", "read", "follow"), **looks},
        callbacks.CALLBACK_STREAM: {GATEWAY: ("make", "own", "read"), **looks},
    }
    for rights in streams.values():
        if ADMIN in rights:
            rights[CONSOLE] = rights[ADMIN]
    for name in repositories:
        bucket = live.repository_bucket(name)
        for stream in (f"KV_{bucket}", f"OBJ_{bucket}"):
            streams[stream] = {WORKER: ("look", "read", "follow"), ADMIN: stored}
    return streams


def _contents(repositories: Iterable[str]) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Keys of buckets and objects of stores: users that write them, users that subscribe to writes."""
    pushed = [live.repository_bucket(name) for name in repositories]
    return [
        (live.REGISTRY_WRITES, (SCHEDULER, WORKER), ALL_USERS),
        (anything(live.settings_subject), ROLES, ()),
        (f"{anything(live.settings_subject)}.*", ROLES, ()),
        (anything(live.desired_subject), (GATEWAY, WORKER), ()),
        (f"$KV.{live.REGIONS_BUCKET}.*.*", (GATEWAY,), ()),
        (f"$KV.{live.STATES_BUCKET}.>", (WORKER,), ()),
        (anything(live.cached), (GATEWAY, WORKER), ()),
        (anything(live.owner_record), (SCHEDULER,), ()),
        (anything(live.known_model_subject), (SCHEDULER, GATEWAY), ()),
        (anything(live.traffic_subject), (GATEWAY,), ()),
        (anything(live.history), (GATEWAY,), ()),
        (f"$O.{live.SHADOW_STORE}.>", (GATEWAY,), ()),
        (durable.lease_subject("*"), (GATEWAY,), ()),
        (durable.secret("*"), (GATEWAY,), ()),
        (durable.lease_subject("*.>"), (GATEWAY,), ()),
        (durable.job_subject(">"), (GATEWAY,), ()),
        (f"$O.{live.MODEL_FILES_STORE}.>", (GATEWAY, WORKER), ()),
        (f"$O.{durable.REQUEST_OBJECTS}.>", (GATEWAY, PRODUCER, *OBSERVERS), ()),
        (f"$O.{durable.RESULT_OBJECTS}.>", (GATEWAY,), ()),
        *(
            (live.stored_entry(bucket, ">"), (), readers)
            for bucket, readers in (
                (live.SETTINGS_BUCKET, ROLES),
                (live.MODELS_BUCKET, (GATEWAY, WORKER)),
                (live.REGIONS_BUCKET, (GATEWAY,)),
                (live.KNOWN_MODELS_BUCKET, ALL_USERS),
                (live.TRAFFIC_BUCKET, (GATEWAY,)),
                (durable.JOBS_BUCKET, (GATEWAY,)),
            )
        ),
        *((f"$KV.{bucket}.*", (ADMIN,), (WORKER,)) for bucket in pushed),
        *((f"$O.{bucket}.>", (ADMIN,), ()) for bucket in pushed),
    ]


def permissions(live_streams: int = 1, repositories: Sequence[str] = ("models",)) -> dict[str, Permissions]:
    """The table, by user. `live_streams` is the number of streams of live requests, `repositories` names the model
    repositories in NATS.
    """
    publish: dict[str, list[str]] = {user: [] for user in USERS}
    subscribe: dict[str, list[str]] = {user: [] for user in USERS}
    for subject, writers, readers in (*_MESSAGES, *_contents(repositories)):
        for user in writers:
            publish[user].append(subject)
        for user in readers:
            subscribe[user].append(subject)
    for stream, rights in _streams(live_streams, repositories).items():
        for user, names in rights.items():
            for right in names:
                publish[user] += [f"{_API}.{subject.format(stream)}" for subject in _REQUESTS.get(right, ())]
                if right in _ACKS:
                    publish[user].append(_ACKS[right].format(stream))
    for user in USERS:
        # Clients such as nats-py look up the stream of a subject, and the limits of the account.
        publish[user] += [f"{_API}.STREAM.NAMES", f"{_API}.INFO"]
    for user in OBSERVERS:
        publish[user].append(f"{_API}.STREAM.LIST")
    return {
        user: Permissions(tuple(dict.fromkeys(publish[user])), tuple(dict.fromkeys(subscribe[user]))) for user in USERS
    }


def allows(patterns: Iterable[str], subject: str) -> bool:
    """Whether one of the patterns covers `subject`, which may have wildcards itself."""
    return any(_covers(pattern.split("."), subject.split(".")) for pattern in patterns)


def _covers(pattern: Sequence[str], subject: Sequence[str]) -> bool:
    for position, part in enumerate(pattern):
        if part == ">":
            return len(subject) > position
        if position >= len(subject) or subject[position] == ">":
            return False
        if part not in ("*", subject[position]):
            return False
    return len(pattern) == len(subject)


def nats_conf(users: Sequence[str] = USERS, live_streams: int = 1, repositories: Sequence[str] = ("models",)) -> str:
    """The block `authorization` of nats-server's configuration; passwords are variables of its environment."""
    table = permissions(live_streams, repositories)
    blocks = "\n".join(_user(user, table[user]) for user in users)
    return f"authorization {{\n  users = [\n{blocks}\n  ]\n}}\n"


def _user(user: str, may: Permissions) -> str:
    return (
        f"    {{\n      user: weir-{user}, password: $WEIR_{user.upper()}_PASSWORD\n      permissions = {{\n"
        f"        publish = {{allow: [{_listed(may.publish)}]}}\n"
        f"        subscribe = {{allow: [{_listed(may.subscribe)}]}}\n      }}\n    }}"
    )


def _listed(subjects: Iterable[str]) -> str:
    lines = "".join(f'\n          "{subject}"' for subject in sorted(subjects))
    return f"{lines}\n        "
