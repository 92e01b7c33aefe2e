"""`weir serve`: everything in one command, by starting the other commands and minding them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from bus.embedded import EmbeddedNats
from telemetry.logs import configure_logging
from weir import NATS_URL_VARIABLE, options
from weir.options import LogFormat, Switch
from weir.preflight import check_listeners, check_repositories
from weir.role import RoleSpec
from weir.startup_block import StartupFacts, render_startup_block
from weir.supervisor import Supervisor

logger = logging.getLogger("weir.serve")

# -P: what lies in the current folder must not be imported in place of our packages.
_WEIR = (sys.executable, "-P", "-m", "weir")
_DRAWN_PORTS = {"http_port": "--http-port", "grpc_port": "--grpc-port", "metrics_port": "--metrics-port"}


def serve(
    model_repository: options.ModelRepositories = None,
    model_config_name: options.ModelConfigName = None,
    disable_auto_complete_config: options.DisableAutoCompleteConfig = Switch.FALSE,
    model_load_thread_count: options.ModelLoadThreadCount = 4,
    exit_on_error: options.ExitOnError = Switch.FALSE,
    http_address: options.HttpAddress = "127.0.0.1",
    http_port: options.HttpPort = 8000,
    http_max_input_size: options.HttpMaxInputSize = 64 * 1024 * 1024,
    grpc_address: options.GrpcAddress = "127.0.0.1",
    grpc_port: options.GrpcPort = 8001,
    metrics_address: options.MetricsAddress = None,
    metrics_port: options.MetricsPort = 8002,
    nats: options.Nats = None,
    nats_server: options.NatsServer = None,
    nats_port: options.NatsPort = 0,
    data_dir: options.DataDir = None,
    id: options.ServerId = "triton",
    strict_readiness: options.StrictReadiness = Switch.TRUE,
    exit_timeout_secs: options.ExitTimeoutSecs = 30.0,
    log_format: options.LogFormatOption = LogFormat.TEXT,
    log_verbose: options.LogVerbose = 0,
) -> None:
    """Serve model repositories: message bus, scheduler, worker and gateway in one command."""
    configure_logging("supervisor", log_format.value, log_verbose)
    repositories = check_repositories(model_repository)
    listeners = {
        "http": (http_address, http_port),
        "grpc": (grpc_address, grpc_port),
        "metrics": (metrics_address or http_address, metrics_port),
    }
    check_listeners([("HTTP", *listeners["http"]), ("GRPC", *listeners["grpc"]), ("metrics", *listeners["metrics"])])
    common = _arguments(exit_timeout_secs=exit_timeout_secs, log_format=log_format, log_verbose=log_verbose)
    scheduler = RoleSpec(name="scheduler", argv=(*_WEIR, "scheduler", *common), drain_rank=1)
    worker = RoleSpec(
        name="worker",
        argv=(
            *_WEIR,
            "worker",
            *(f"--model-repository={path}" for path in repositories),
            *_arguments(
                model_config_name=model_config_name,
                disable_auto_complete_config=disable_auto_complete_config,
                model_load_thread_count=model_load_thread_count,
                exit_on_error=exit_on_error,
            ),
            *common,
        ),
        drain_rank=2,
    )
    gateway = RoleSpec(
        name="gateway",
        argv=(
            *_WEIR,
            "gateway",
            *_arguments(
                http_address=http_address,
                http_port=http_port,
                http_max_input_size=http_max_input_size,
                grpc_address=grpc_address,
                grpc_port=grpc_port,
                metrics_address=metrics_address,
                metrics_port=metrics_port,
                id=id,
                strict_readiness=strict_readiness,
            ),
            *common,
        ),
        drain_rank=0,
        kept_facts=_DRAWN_PORTS,
    )
    with contextlib.ExitStack() as stack:
        embedded = None
        if nats is None:
            folder = data_dir or stack.enter_context(_default_data_dir(http_port))
            embedded = EmbeddedNats(folder, nats_server, nats_port)
        supervisor = Supervisor(
            [scheduler, worker, gateway],
            nats=embedded,
            environment={} if nats is None else {NATS_URL_VARIABLE: nats},
            on_ready=functools.partial(_report, listeners, nats, embedded),
            exit_timeout_s=exit_timeout_secs,
        )
        status = supervisor.run()
    raise typer.Exit(status)


def _arguments(**values: object) -> tuple[str, ...]:
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None)


@contextlib.contextmanager
def _default_data_dir(http_port: int) -> Iterator[Path]:
    if http_port == 0:
        with tempfile.TemporaryDirectory(prefix="weir-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    else:
        home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        yield Path(home) / "weir" / str(http_port)


def _report(
    listeners: Mapping[str, tuple[str, int]],
    nats_url: str | None,
    embedded: EmbeddedNats | None,
    facts: Mapping[str, Mapping[str, Any]],
) -> None:
    announced = facts["gateway"]
    places = {name: _place(address, announced.get(f"{name}_port", port)) for name, (address, port) in listeners.items()}
    for service, name in (("GRPCInferenceService", "grpc"), ("HTTPService", "http"), ("Metrics Service", "metrics")):
        logger.info("Started %s at %s", service, places[name])
    block = render_startup_block(
        StartupFacts(
            http=places["http"],
            grpc=places["grpc"],
            metrics=places["metrics"],
            nats_url=embedded.url if embedded else nats_url or "",
            data_dir=str(embedded.data_dir) if embedded else None,
            models=announced.get("models", []),
        )
    )
    # The server goes on when nobody reads what it prints.
    with contextlib.suppress(OSError):
        print(f"\n{block}\n", flush=True)


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
