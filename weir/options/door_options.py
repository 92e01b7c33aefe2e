"""Options of what a gateway listens to: Triton's names, meanings and defaults.

One default differs on purpose: servers listen on loopback unless told otherwise.
"""

from __future__ import annotations

from typing import Any

from weir.options.option import GATEWAY, SERVE, WORKER, Option, switch
from weir.options.values import Choice, Integer, Text

_IN_GATEWAY = (SERVE, GATEWAY)
_IN_WORKER = (SERVE, WORKER)

_PORT = Integer(0, 65535, metavar="PORT")
_PORT_HELP = "Port; 0 takes a free one."
_RANGE = "0 takes a free port; numbers that are no ports are refused."
_ADDRESS = Text("ADDRESS")
_LOOPBACK = "127.0.0.1"
_LOOPBACK_FIRST = "The default is 127.0.0.1; Triton listens on all addresses."


def _http() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "HTTP", "commands": _IN_GATEWAY}
    return (
        switch("--allow-http", True, "Listen for HTTP.", **panel),
        Option(
            names=("--http-address",),
            value=_ADDRESS,
            default=_LOOPBACK,
            help="Address to listen on.",
            differs=_LOOPBACK_FIRST,
            **panel,
        ),
        Option(names=("--http-port",), value=_PORT, differs=_RANGE, default=8000, help=_PORT_HELP, **panel),
        switch("--reuse-http-port", False, "Share the port with other servers that have this option.", **panel),
        Option(
            names=("--http-max-input-size",),
            value=Integer(1, complaint="Error: --http-max-input-size must be greater than 0.", metavar="BYTES"),
            default=64 * 1024 * 1024,
            help="Largest request body, also when decompressed, in bytes.",
            **panel,
        ),
        Option(
            names=("--http-header-forward-pattern",),
            value=Text("REGEX"),
            default="",
            help="Headers that become parameters of the request.",
            **panel,
        ),
        Option(
            names=("--http-restricted-api",),
            value=Text("APIS:KEY=VALUE"),
            help="Answer these APIs (separated by commas) only with header KEY: VALUE; may be repeated.",
            repeatable=True,
            **panel,
        ),
        Option(
            names=("--allowed-hosts",),
            value=Text("NAME"),
            help="Further name of this server (*.example.com: all below) that requests which change something may have in "
            "Host; may be repeated. Addresses, localhost, names without a dot and the machine's own name always may.",
            repeatable=True,
            ours=True,
            **panel,
        ),
        Option(
            names=("--allowed-origins",),
            value=Text("ORIGIN"),
            help="Web origin whose pages may send requests that change something; may be repeated.",
            repeatable=True,
            ours=True,
            **panel,
        ),
    )


def _grpc() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "gRPC", "commands": _IN_GATEWAY}
    milliseconds = Integer(0, 2**31 - 1, metavar="MS")
    count = Integer(0, 2**31 - 1)
    return (
        switch("--allow-grpc", True, "Listen for gRPC.", **panel),
        Option(
            names=("--grpc-address",),
            value=_ADDRESS,
            default=_LOOPBACK,
            help="Address to listen on.",
            differs=_LOOPBACK_FIRST,
            **panel,
        ),
        Option(names=("--grpc-port",), value=_PORT, differs=_RANGE, default=8001, help=_PORT_HELP, **panel),
        switch("--reuse-grpc-port", False, "Share the port with other servers that have this option.", **panel),
        Option(
            names=("--grpc-header-forward-pattern",),
            value=Text("REGEX"),
            default="",
            help="Metadata that becomes parameters of the request.",
            **panel,
        ),
        Option(
            names=("--grpc-restricted-protocol",),
            value=Text("PROTOCOLS:KEY=VALUE"),
            help="Answer these protocols (separated by commas) only with metadata triton-grpc-protocol-KEY: VALUE; "
            "may be repeated.",
            repeatable=True,
            **panel,
        ),
        switch("--grpc-use-ssl", False, "Speak TLS.", **panel),
        switch("--grpc-use-ssl-mutual", False, "Speak TLS, and ask clients for a certificate.", **panel),
        Option(
            names=("--grpc-server-cert",),
            value=Text("FILE"),
            default="",
            help="The server's certificate, as PEM.",
            **panel,
        ),
        Option(names=("--grpc-server-key",), value=Text("FILE"), default="", help="Its key, as PEM.", **panel),
        Option(
            names=("--grpc-root-cert",),
            value=Text("FILE"),
            default="",
            help="The certificates that clients' ones are checked against, as PEM.",
            **panel,
        ),
        Option(
            names=("--grpc-infer-response-compression-level",),
            value=Choice(
                ("none", "low", "medium", "high"), "invalid argument for --grpc_infer_response_compression_level"
            ),
            default="none",
            help="Compression of answers.",
            **panel,
        ),
        Option(
            names=("--grpc-keepalive-time",),
            value=milliseconds,
            default=7_200_000,
            help="Quiet time after which the server pings, in ms.",
            **panel,
        ),
        Option(
            names=("--grpc-keepalive-timeout",),
            value=milliseconds,
            default=20_000,
            help="Time for the answer to a ping, in ms; then the connection ends.",
            **panel,
        ),
        switch("--grpc-keepalive-permit-without-calls", False, "Ping also when no call is open.", **panel),
        Option(
            names=("--grpc-http2-max-pings-without-data",),
            value=count,
            default=2,
            help="Pings the server sends in a row without data between them; 0: any number.",
            **panel,
        ),
        Option(
            names=("--grpc-http2-min-recv-ping-interval-without-data",),
            value=milliseconds,
            default=300_000,
            help="Pings of a client that come sooner after each other than this are bad, in ms.",
            **panel,
        ),
        Option(
            names=("--grpc-http2-max-ping-strikes",),
            value=count,
            default=2,
            help="Bad pings after which the connection ends; 0: any number is borne.",
            **panel,
        ),
        Option(
            names=("--grpc-max-connection-age",),
            value=milliseconds,
            default=0,
            help="Longest life of a connection, in ms; 0: no limit.",
            **panel,
        ),
        Option(
            names=("--grpc-max-connection-age-grace",),
            value=milliseconds,
            default=0,
            help="Time for open calls after that, in ms; 0: no limit.",
            **panel,
        ),
    )


def _metrics_and_trace() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Metrics", "commands": _IN_GATEWAY}
    in_worker: dict[str, Any] = {"panel": "Metrics", "commands": _IN_WORKER}
    return (
        switch("--allow-metrics", True, "Listen for requests of metrics.", **panel),
        Option(
            names=("--metrics-address",),
            value=_ADDRESS,
            shown_default="that of HTTP",
            help="Address to listen on.",
            **panel,
        ),
        Option(names=("--metrics-port",), value=_PORT, differs=_RANGE, default=8002, help=_PORT_HELP, **panel),
        switch("--allow-gpu-metrics", True, "Tell of GPUs.", **in_worker),
        switch("--allow-cpu-metrics", True, "Tell of the CPU and of memory.", **in_worker),
        Option(
            names=("--metrics-interval-ms",),
            value=Integer(1, metavar="MS"),
            default=2000,
            help="Time between two measurements of devices, in ms.",
            **in_worker,
        ),
        Option(
            names=("--metrics-config",),
            value=Text("SETTING=VALUE"),
            help="counter_latencies, summary_latencies, summary_quantiles or histogram_latencies; may be repeated.",
            repeatable=True,
            panel="Metrics",
            commands=(SERVE, GATEWAY, WORKER),
        ),
        Option(
            names=("--trace-config",),
            value=Text("[MODE,]SETTING=VALUE"),
            help="level, rate, count or mode, or a setting of mode triton or opentelemetry; may be repeated.",
            repeatable=True,
            panel="Trace",
            commands=_IN_GATEWAY,
        ),
    )


DOOR_OPTIONS: tuple[Option, ...] = (
    *_http(),
    *_grpc(),
    *_metrics_and_trace(),
)
"""Those of this module."""
