"""The subjects that each role may publish on and subscribe to: one table, as an auditor reads it.

A test compares it with the functions that name subjects. It is for operators whose nats-server serves other users too, and
limits what a compromised role can do: workers run users' code. `nats_conf` writes it as nats-server's configuration. The
rights to JetStream's API are listed stream by stream; there is no `$JS.API.>` and no `$SYS.>`. Responses to each role come
to an inbox of its own (`_INBOX_<role>`), which no other role may read.
Source: nats-server's configuration (`authorization`, `permissions`); the subjects of JetStream's API.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weir.bus.naming.subjects import live_stream, repository_bucket

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


@dataclass(frozen=True, slots=True)
class Permissions:
    """The subjects that one user may publish on, and those it may subscribe to.

    No user has nats-server's `allow_responses`, which lets a role publish on any reply subject, also on one that the
    requester may not publish on.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


# Subject, users that publish, users that subscribe.

_MESSAGES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("live.*", (GATEWAY, WORKER), ()),
    ("live.*.*", (GATEWAY, WORKER), ()),
    ("infer.*", (PRODUCER, CONSOLE), (GATEWAY,)),
    ("infer.*.*", (PRODUCER, CONSOLE), (GATEWAY,)),
    ("flow.*.*", (PRODUCER, CONSOLE), (GATEWAY,)),
    ("by.*.infer.*", (), (GATEWAY,)),
    ("by.*.infer.*.*", (), (GATEWAY,)),
    ("by.*.flow.*.*", (), (GATEWAY,)),
    ("work.*", (SCHEDULER,), (WORKER,)),
    ("reply.*", (SCHEDULER, WORKER), (GATEWAY, WORKER)),
    ("ack.*.*", (), (GATEWAY, WORKER)),
    ("done.*", (WORKER,), (SCHEDULER,)),
    ("lost.*.*", (), (SCHEDULER,)),
    ("inbox.*.*", (), (SCHEDULER,)),
    ("cancel.*", (GATEWAY, WORKER), (SCHEDULER,)),
    ("abandoned.*", (SCHEDULER,), (WORKER,)),
    ("drain.*", (WORKER,), (SCHEDULER,)),
    ("drained.*", (SCHEDULER,), (WORKER,)),
    ("sequences.*", (SCHEDULER,), (WORKER,)),
    ("sequence-reports.*.*", (WORKER,), (SCHEDULER,)),
    ("release.*", (GATEWAY, WORKER), (GATEWAY, WORKER)),
    ("probe.*", (SCHEDULER,), (SCHEDULER, WORKER)),
    ("heartbeat.*", (WORKER,), ALL_USERS),
    ("presence.gateway.*", (GATEWAY,), (GATEWAY,)),
    ("presence.scheduler.*", (SCHEDULER,), (SCHEDULER,)),
    ("presence.worker.*", (WORKER,), ()),
    ("presence.durable.*", (GATEWAY,), ()),  # `weir durable` connects as a gateway
    ("presence.console.*", (CONSOLE,), ()),
    ("presence.*.*", (), OBSERVERS),
    ("presence.query", (GATEWAY, SCHEDULER, *OBSERVERS), (*ROLES, CONSOLE)),
    ("peers.query", (GATEWAY,), (GATEWAY,)),
    ("peers.answer.*.*", (GATEWAY,), (GATEWAY,)),
    ("owner.*", (SCHEDULER,), (SCHEDULER, WORKER)),
    ("statistics.query", (GATEWAY, *OBSERVERS), ROLES),
    ("statistics.last", ROLES, (GATEWAY, *OBSERVERS)),
    ("traffic.counters", (GATEWAY,), (GATEWAY,)),
    ("statistics.answer.*.*", ROLES, (GATEWAY, *OBSERVERS)),
    ("limits.request", (GATEWAY,), (GATEWAY,)),
    ("limits.answer.*.*", (GATEWAY,), (GATEWAY,)),
    ("api.request", (CONSOLE,), (GATEWAY,)),
    ("api.answer.*.*", (GATEWAY,), (CONSOLE,)),
    ("observe.request", OBSERVERS, (GATEWAY, SCHEDULER)),
    ("observed.*", (GATEWAY, SCHEDULER), OBSERVERS),
    ("readiness.*", (GATEWAY, WORKER), (WORKER,)),
    ("ready.*.*", (WORKER,), (GATEWAY, WORKER)),
    ("repository.query", (GATEWAY,), (WORKER,)),
    ("repository.*", (WORKER,), (GATEWAY,)),
    ("cuda-open.*", (GATEWAY,), (WORKER,)),
    ("cuda-close.*", (GATEWAY,), (WORKER,)),
    ("cuda-opened.*.*", (WORKER,), (GATEWAY,)),
    ("cached.*.*", (), (GATEWAY, WORKER)),
    ("fetch.*", (GATEWAY, WORKER), (GATEWAY, WORKER)),
    ("fetched.*.*", (GATEWAY, WORKER), (GATEWAY, WORKER)),
    # Durable requests
    ("event.*", (PRODUCER, *OBSERVERS), ()),
    ("event.*.*", (PRODUCER, *OBSERVERS), ()),
    ("batch.*", (PRODUCER, *OBSERVERS), ()),
    ("batch.*.*", (PRODUCER, *OBSERVERS), ()),
    ("event.*.job.>", (GATEWAY, *OBSERVERS), ()),
    ("result.>", (GATEWAY,), (GATEWAY, PRODUCER)),
    ("dead.>", (GATEWAY,), ()),
    ("stored.*.*", (), ALL_USERS),
    ("durable-inbox.*.>", (), (GATEWAY,)),
    ("durable.cancel", (GATEWAY,), (GATEWAY,)),
    ("lost-attempts.*", (SCHEDULER,), (GATEWAY,)),
    ("callback.>", (GATEWAY,), ()),
    ("audit.*", (GATEWAY, CONSOLE), ()),
    # Reply subjects of producers
    ("_INBOX.>", (GATEWAY,), (PRODUCER,)),
    ("answers.>", (GATEWAY,), (PRODUCER,)),
    ("answers.console.>", (), (CONSOLE,)),
    ("_INBOX_gateway.>", (), (GATEWAY,)),
    ("_INBOX_scheduler.>", (), (SCHEDULER,)),
    ("_INBOX_worker.>", (), (WORKER,)),
    ("_INBOX_admin.>", (), (ADMIN,)),
    ("_INBOX_console.>", (), (CONSOLE,)),
    ("$SRV.*", (PRODUCER,), (GATEWAY,)),
    ("$SRV.*.weir", (PRODUCER,), (GATEWAY,)),
    ("$SRV.*.weir.*", (PRODUCER,), (GATEWAY,)),
    # Whether nats-server syncs before it acknowledges: it responds only in the system account.
    ("$SYS.REQ.SERVER.PING.JSZ", (GATEWAY,), ()),
    ("$JS.EVENT.ADVISORY.STREAM.DELETED.QUEUE", (), (GATEWAY,)),
    ("$JS.EVENT.ADVISORY.STREAM.DELETED.RESULT", (), (GATEWAY,)),
    ("$JS.EVENT.ADVISORY.STREAM.DELETED.DEAD", (), (GATEWAY,)),
    ("$JS.EVENT.ADVISORY.STREAM.UPDATED.QUEUE", (), (GATEWAY,)),
    ("$JS.EVENT.ADVISORY.STREAM.UPDATED.RESULT", (), (GATEWAY,)),
    ("$JS.EVENT.ADVISORY.STREAM.UPDATED.DEAD", (), (GATEWAY,)),
)


# What a user of a client may do who is a principal by its name: subjects of its own for requests and responses.

_OF_BROKER_USER = Permissions(
    publish=(
        "by.{}.infer.*",
        "by.{}.infer.*.*",
        "by.{}.flow.*.*",
        "$SRV.*",
        "$SRV.*.weir",
        "$SRV.*.weir.*",
    ),
    subscribe=("_INBOX.{}.>", "answers.{}.>"),
)

_is_broker_user = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch


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
    all_live = map(live_stream, range(live_streams))
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
        "KV_registry": {**read, ADMIN: ("look", "read", "follow")},
        "KV_settings": {**read, GATEWAY: followed, **looks},
        "KV_models": {**read, GATEWAY: followed, ADMIN: ("look", "read", "follow")},
        "OBJ_model-files": {GATEWAY: stored, WORKER: stored, **looks},
        "KV_client-regions": {GATEWAY: (*stored, "limit"), **looks},
        "KV_sequence-states": {WORKER: stored, SCHEDULER: ("look", "read"), **looks},
        "KV_response-cache": {GATEWAY: ("make", "read"), WORKER: ("make", "read"), **looks},
        "KV_queue-owners": {SCHEDULER: ("make", "read"), **looks},
        # A scheduler without --scale-to-zero removes what another one has stored.
        "KV_known-models": {
            SCHEDULER: (*followed, "abolish"),
            GATEWAY: ("read", "follow"),
            ADMIN: ("look", "read", "follow"),
            WORKER: ("read", "follow"),
        },
        "OBJ_shadow-samples": {GATEWAY: stored, **looks},
        "HISTORY": {GATEWAY: ("make", "read", "follow"), ADMIN: ("look", "read", "follow")},
        "KV_traffic": {GATEWAY: followed, ADMIN: ("look", "read", "follow")},
        "QUEUE": {
            GATEWAY: ("make", "limit", "read", "own", "rewind", "remove"),
            ADMIN: ("look", "read", "list"),
        },
        "RESULT": {
            GATEWAY: ("make", "limit", "read", "remove"),
            PRODUCER: ("look", "read", "own", "follow"),
            ADMIN: ("look", "read", "follow"),
        },
        "DEAD": {GATEWAY: ("make", "limit", "read"), ADMIN: ("look", "read", "own", "follow", "remove")},
        "KV_leases": {GATEWAY: ("make", "read"), **looks},
        "KV_secrets": {GATEWAY: ("make", "read")},
        "KV_jobs": {GATEWAY: followed, **looks},
        # Only the operator, who is `admin`, creates the bucket of keys and writes to it.
        "KV_access_keys": {
            GATEWAY: ("look", "read", "follow"),
            ADMIN: ("make", "read", "follow"),
            CONSOLE: ("look", "read", "follow"),
        },
        "OBJ_requests": {GATEWAY: stored, PRODUCER: ("look",), ADMIN: stored},
        "OBJ_results": {GATEWAY: stored, PRODUCER: ("look", "read", "follow"), **looks},
        "CALLBACKS": {GATEWAY: ("make", "own", "read"), **looks},
    }
    for rights in streams.values():
        if ADMIN in rights:
            rights.setdefault(CONSOLE, rights[ADMIN])
    # Who did what is for the operator alone: the processes that record it can't read it.
    streams["AUDIT"] = {GATEWAY: ("make", "limit"), CONSOLE: ("make", "limit"), ADMIN: ("look", "read", "follow")}
    for name in repositories:
        bucket = repository_bucket(name)
        for stream in (f"KV_{bucket}", f"OBJ_{bucket}"):
            streams[stream] = {WORKER: ("look", "read", "follow"), ADMIN: stored}
    return streams


def _contents(repositories: Iterable[str]) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Keys of buckets and objects of stores: users that write them, users that subscribe to writes."""
    pushed = [repository_bucket(name) for name in repositories]
    return [
        ("$KV.registry.>", (SCHEDULER, WORKER), ALL_USERS),
        ("$KV.settings.*", ROLES, ()),
        ("$KV.settings.*.*", ROLES, ()),
        ("$KV.models.*", (GATEWAY, WORKER), ()),
        ("$KV.client-regions.*.*", (GATEWAY,), ()),
        ("$KV.sequence-states.>", (WORKER,), ()),
        ("$KV.response-cache.*", (GATEWAY, WORKER), ()),
        ("$KV.queue-owners.*", (SCHEDULER,), ()),
        ("$KV.known-models.*", (SCHEDULER, GATEWAY), ()),
        ("$KV.traffic.*", (GATEWAY,), ()),
        ("history.*", (GATEWAY,), ()),
        ("$O.shadow-samples.>", (GATEWAY,), ()),
        ("$KV.leases.*", (GATEWAY,), ()),
        ("$KV.secrets.*", (GATEWAY,), ()),
        ("$KV.leases.*.>", (GATEWAY,), ()),
        ("$KV.jobs.>", (GATEWAY,), ()),
        ("$O.model-files.>", (GATEWAY, WORKER), ()),
        ("$O.requests.>", (GATEWAY, PRODUCER, *OBSERVERS), ()),
        ("$O.results.>", (GATEWAY,), ()),
        ("kv.settings.>", (), ROLES),
        ("kv.models.>", (), (GATEWAY, WORKER)),
        ("kv.client-regions.>", (), (GATEWAY,)),
        ("kv.known-models.>", (), ALL_USERS),
        ("kv.traffic.>", (), (GATEWAY,)),
        ("kv.jobs.>", (), (GATEWAY,)),
        ("$KV.access_keys.*", (ADMIN,), ()),
        ("kv.access_keys.>", (), (GATEWAY, *OBSERVERS)),
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


def permissions_of_broker_user(name: str) -> Permissions:
    """What the user `name` of a client may do, whose subjects prove that it is the publisher; "*" for any such user."""
    may = _OF_BROKER_USER
    return Permissions(
        tuple(subject.format(name) for subject in may.publish), tuple(subject.format(name) for subject in may.subscribe)
    )


def check_broker_users(names: Sequence[str]) -> None:
    """Raises ValueError, with the reason, for names that can't be users of clients beside Weir's own users."""
    variables: dict[str, str] = {}
    for name in names:
        if not _is_broker_user(name):
            raise ValueError(f"'{name}' must have 1 to 64 letters, digits, '-' and '_'")
        if name in USERS or name.startswith("weir-"):
            raise ValueError(f"'{name}' is a name of Weir's own users")
        variable = _password_variable(name)
        if variable in variables:
            raise ValueError(f"'{variables[variable]}' and '{name}' would have the same password, ${variable}")
        variables[variable] = name


def _password_variable(broker_user: str) -> str:
    return f"WEIR_USER_{broker_user.upper().replace('-', '_')}_PASSWORD"


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


def nats_conf(
    users: Sequence[str] = USERS,
    live_streams: int = 1,
    repositories: Sequence[str] = ("models",),
    broker_users: Sequence[str] = (),
) -> str:
    """The block `authorization` of nats-server's configuration; passwords are variables of its environment.

    `broker_users` are users of clients beside Weir's own; raises ValueError for names that can't be (`check_broker_users`).
    """
    check_broker_users(broker_users)
    table = permissions(live_streams, repositories)
    blocks = [_user(f"weir-{user}", f"WEIR_{user.upper()}_PASSWORD", table[user]) for user in users]
    blocks += [_user(f'"{name}"', _password_variable(name), permissions_of_broker_user(name)) for name in broker_users]
    listed = "\n".join(blocks)
    return f"authorization {{\n  users = [\n{listed}\n  ]\n}}\n"


def _user(user: str, variable: str, may: Permissions) -> str:
    return (
        f"    {{\n      user: {user}, password: ${variable}\n      permissions = {{\n"
        f"        publish = {{allow: [{_listed(may.publish)}]}}\n"
        f"        subscribe = {{allow: [{_listed(may.subscribe)}]}}\n      }}\n    }}"
    )


def _listed(subjects: Iterable[str]) -> str:
    lines = "".join(f'\n          "{subject}"' for subject in sorted(subjects))
    return f"{lines}\n        "
