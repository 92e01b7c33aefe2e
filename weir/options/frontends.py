"""Options of the gateway's listeners: Triton's names, meanings and defaults.

One default differs on purpose: servers listen on loopback unless an address is given.
"""

from __future__ import annotations

from typing import Any

from weir.options.option import CONSOLE, DURABLE, GATEWAY, SERVE, WORKER, Option, switch
from weir.options.secret import Secret, has_identity
from weir.options.values import Choice, Integer, PortRange, Text

_IN_GATEWAY = (SERVE, GATEWAY)
_IN_WORKER = (SERVE, WORKER)

_PORT = Integer(0, 65535, metavar="PORT")
_PORT_HELP = "Port; 0 selects a free one."
_RANGE = "0 selects a free port; numbers outside 0 to 65535 are rejected."
_ADDRESS = Text("ADDRESS")
_LOOPBACK = "127.0.0.1"
_LOOPBACK_FIRST = "The default is 127.0.0.1; Triton listens on all addresses."


def _http() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "HTTP", "commands": _IN_GATEWAY}
    return (
        switch("--allow-http", True, "Serve HTTP.", **panel),
        Option(
            names=("--http-address",),
            is_common=True,
            value=_ADDRESS,
            default=_LOOPBACK,
            help="Address to listen on.",
            differs=_LOOPBACK_FIRST,
            **panel,
        ),
        Option(
            names=("--http-port",),
            is_common=True,
            value=_PORT,
            differs=_RANGE,
            default=8000,
            help=_PORT_HELP,
            **panel,
        ),
        switch("--reuse-http-port", False, "Share the port with other servers that have this option.", **panel),
        Option(
            names=("--http-max-input-size",),
            is_common=True,
            value=Integer(1, complaint="Error: --http-max-input-size must be greater than 0.", metavar="BYTES"),
            default=64 * 1024 * 1024,
            help="Largest request body, also when decompressed, in bytes.",
            panel="HTTP",
            commands=(*_IN_GATEWAY, DURABLE),
        ),
        Option(
            names=("--http-header-forward-pattern",),
            value=Text("REGEX"),
            default="",
            help="Pattern of HTTP headers to forward as request parameters.",
            **panel,
        ),
        Option(
            names=("--http-restricted-api",),
            value=Secret(Text("APIS:KEY=VALUE")),
            help="Serve these APIs (separated by commas) only to requests with header KEY: VALUE; may be repeated.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--allowed-hosts",),
            value=Text("NAME"),
            help="Additional host name of this server (*.example.com: all its subdomains) to accept in the Host header "
            "of requests that change state; may be repeated. IP addresses, localhost, names without a dot and the "
            "machine's own name are always accepted.",
            repeatable=True,
            ours=True,
            panel="HTTP",
            commands=(*_IN_GATEWAY, CONSOLE),
        ),
        Option(
            names=("--allowed-origins",),
            value=Text("ORIGIN"),
            help="Web origin whose pages may send requests that change state; may be repeated.",
            repeatable=True,
            ours=True,
            **panel,
        ),
        switch(
            "--allow-openapi",
            True,
            "Describe the HTTP API, and the inputs and outputs of each model, at /openapi.json and on the page /docs.",
            ours=True,
            **panel,
        ),
    )


def _grpc() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "gRPC", "commands": _IN_GATEWAY}
    milliseconds = Integer(0, 2**31 - 1, metavar="MS")
    count = Integer(0, 2**31 - 1)
    return (
        switch("--allow-grpc", True, "Serve gRPC.", **panel),
        Option(
            names=("--grpc-address",),
            is_common=True,
            value=_ADDRESS,
            default=_LOOPBACK,
            help="Address to listen on.",
            differs=_LOOPBACK_FIRST,
            **panel,
        ),
        Option(
            names=("--grpc-port",),
            is_common=True,
            value=_PORT,
            differs=_RANGE,
            default=8001,
            help=_PORT_HELP,
            **panel,
        ),
        switch("--reuse-grpc-port", False, "Share the port with other servers that have this option.", **panel),
        Option(
            names=("--grpc-header-forward-pattern",),
            value=Text("REGEX"),
            default="",
            help="Pattern of gRPC metadata to forward as request parameters.",
            **panel,
        ),
        Option(
            names=("--grpc-restricted-protocol",),
            value=Secret(Text("PROTOCOLS:KEY=VALUE")),
            help="Serve these protocols (separated by commas) only to calls with metadata triton-grpc-protocol-KEY: "
            "VALUE; may be repeated.",
            repeatable=True,
            **panel,
        ),
        switch("--grpc-use-ssl", False, "Use TLS.", **panel),
        switch("--grpc-use-ssl-mutual", False, "Use TLS and require a client certificate.", **panel),
        Option(
            names=("--grpc-server-cert",),
            value=Text("FILE"),
            default="",
            help="The server's certificate (PEM).",
            **panel,
        ),
        Option(
            names=("--grpc-server-key",),
            value=Text("FILE"),
            default="",
            help="The private key of that certificate (PEM).",
            **panel,
        ),
        Option(
            names=("--grpc-root-cert",),
            value=Text("FILE"),
            default="",
            help="The authorities that must have signed client certificates (PEM).",
            **panel,
        ),
        Option(
            names=("--grpc-infer-response-compression-level",),
            value=Choice(
                ("none", "low", "medium", "high"), "invalid argument for --grpc_infer_response_compression_level"
            ),
            default="none",
            help="Compression of responses.",
            **panel,
        ),
        Option(
            names=("--grpc-keepalive-time",),
            value=milliseconds,
            default=7_200_000,
            help="Idle time after which the server pings the client, in ms.",
            **panel,
        ),
        Option(
            names=("--grpc-keepalive-timeout",),
            value=milliseconds,
            default=20_000,
            help="Time to wait for the response to a ping before closing the connection, in ms.",
            **panel,
        ),
        switch("--grpc-keepalive-permit-without-calls", False, "Ping also while no call is open.", **panel),
        Option(
            names=("--grpc-http2-max-pings-without-data",),
            value=count,
            default=2,
            help="Pings in a row that the server sends without data between them; 0: no limit.",
            **panel,
        ),
        Option(
            names=("--grpc-http2-min-recv-ping-interval-without-data",),
            value=milliseconds,
            default=300_000,
            help="Shortest allowed interval between pings of a client, in ms; a shorter one is a strike.",
            **panel,
        ),
        Option(
            names=("--grpc-http2-max-ping-strikes",),
            value=count,
            default=2,
            help="Strikes after which the server closes the connection; 0: no limit.",
            **panel,
        ),
        Option(
            names=("--grpc-max-connection-age",),
            value=milliseconds,
            default=0,
            help="Maximum age of a connection, in ms; 0: no limit.",
            **panel,
        ),
        Option(
            names=("--grpc-max-connection-age-grace",),
            value=milliseconds,
            default=0,
            help="Time that open calls have to finish after that, in ms; 0: no limit.",
            **panel,
        ),
    )


def _metrics_and_trace() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Metrics", "commands": _IN_GATEWAY}
    in_worker: dict[str, Any] = {"panel": "Metrics", "commands": _IN_WORKER}
    return (
        switch("--allow-metrics", True, "Serve metrics.", **panel),
        Option(
            names=("--metrics-address",),
            value=_ADDRESS,
            shown_default="the HTTP address",
            help="Address to listen on.",
            **panel,
        ),
        Option(
            names=("--metrics-port",),
            is_common=True,
            value=_PORT,
            differs=_RANGE,
            default=8002,
            help=_PORT_HELP,
            **panel,
        ),
        switch("--allow-gpu-metrics", True, "Report GPU metrics.", **in_worker),
        switch("--allow-cpu-metrics", True, "Report CPU and memory metrics.", **in_worker),
        Option(
            names=("--metrics-interval-ms",),
            value=Integer(1, metavar="MS"),
            default=2000,
            help="Interval between two device measurements, in ms.",
            **in_worker,
        ),
        Option(
            names=("--metrics-config",),
            value=Text("SETTING=VALUE"),
            help="counter_latencies, summary_latencies, summary_quantiles or histogram_latencies; may be repeated.",
            repeatable=True,
            panel="Metrics",
            commands=(SERVE, GATEWAY, DURABLE, WORKER),
        ),
        Option(
            names=("--trace-config",),
            is_common=True,
            value=Secret(Text("[MODE,]SETTING=VALUE"), has_identity),
            help="level, rate, count or mode, or a setting of mode triton or opentelemetry; may be repeated.",
            repeatable=True,
            panel="Trace",
            commands=(*_IN_GATEWAY, DURABLE),
        ),
    )


def _platforms() -> tuple[Option, ...]:
    """The frontends of managed services. `weir.options.platforms` has the defaults that their containers set."""
    sagemaker: dict[str, Any] = {"panel": "SageMaker", "commands": _IN_GATEWAY}
    vertex_ai: dict[str, Any] = {"panel": "Vertex AI", "commands": _IN_GATEWAY}
    address: dict[str, Any] = {
        "value": _ADDRESS,
        "shown_default": "the HTTP address",
        "help": "Address to listen on.",
        "ours": True,
    }
    return (
        switch("--allow-sagemaker", False, "Serve Amazon SageMaker's protocol.", **sagemaker),
        Option(names=("--sagemaker-address",), **address, **sagemaker),
        Option(names=("--sagemaker-port",), value=_PORT, differs=_RANGE, default=8080, help=_PORT_HELP, **sagemaker),
        Option(
            names=("--sagemaker-safe-port-range",),
            value=PortRange(),
            help="The ports that SageMaker allows for the other frontends.",
            panel="SageMaker",
            commands=(SERVE,),
        ),
        switch(
            "--allow-vertex-ai",
            False,
            "Serve Google Vertex AI's protocol.",
            shown_default="false; true if AIP_MODE is PREDICTION",
            **vertex_ai,
        ),
        Option(names=("--vertex-ai-address",), **address, **vertex_ai),
        Option(
            names=("--vertex-ai-port",),
            value=_PORT,
            differs=_RANGE,
            default=8080,
            shown_default="AIP_HTTP_PORT, else 8080",
            help=_PORT_HELP,
            **vertex_ai,
        ),
        Option(
            names=("--vertex-ai-default-model",),
            value=Text("NAME"),
            default="",
            shown_default="the only model",
            help="The model of requests that name none.",
            differs="A model that is not there is an error of the requests, not of the start.",
            **vertex_ai,
        ),
    )


FRONTEND_OPTIONS: tuple[Option, ...] = (
    *_http(),
    *_grpc(),
    *_metrics_and_trace(),
    *_platforms(),
)
"""The options declared in this module."""
