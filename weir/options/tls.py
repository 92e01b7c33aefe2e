"""Options of TLS, which hold for every port of gateways and of the console. All are Weir's own."""

from __future__ import annotations

from typing import Any

from weir.options.option import CONSOLE, GATEWAY, SERVE, Option, switch
from weir.options.values import Choice, Text

_OURS: dict[str, Any] = {"panel": "TLS", "commands": (SERVE, GATEWAY, CONSOLE), "ours": True}

TLS_OPTIONS: tuple[Option, ...] = (
    Option(
        names=("--tls-cert",),
        is_common=True,
        value=Text("FILE"),
        default="",
        help="The server's certificate and those of the authorities between it and the root (PEM). With it HTTP, metrics, "
        "the console and the ports of managed services are encrypted, and gRPC unless --grpc-use-ssl is set. Changed files "
        "are used for new connections within two seconds.",
        **_OURS,
    ),
    Option(
        names=("--tls-key",),
        is_common=True,
        value=Text("FILE"),
        default="",
        help="The private key of that certificate (PEM, without a password).",
        **_OURS,
    ),
    Option(
        names=("--tls-client-ca",),
        value=Text("FILE"),
        default="",
        help="The authorities that must have signed the certificates of clients (PEM); without it clients are asked for "
        "none.",
        **_OURS,
    ),
    Option(
        names=("--tls-client-auth",),
        value=Choice(("require", "request"), "invalid argument for --tls-client-auth", exact=True),
        default="require",
        help="With --tls-client-ca, require: a client without a certificate can't connect, to no port; request: it can.",
        **_OURS,
    ),
    switch(
        "--tls-self-signed",
        False,
        "For a first try: make a certificate that this server has signed itself, and use it as --tls-cert and --tls-key. "
        "It is kept in the data folder.",
        panel="TLS",
        ours=True,
    ),
)
"""The options declared in this module."""
