"""`weir gateway`, `weir scheduler`, `weir worker`: one role each, as `weir serve` and containers run them.

A role's code is imported only when its command runs. Its `main.run(settings)` blocks until the role has ended; a
WeirError it raises is told in one line, here and to the supervisor.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import typer

from schemas.errors import WeirError
from telemetry.logs import configure_logging
from telemetry.readiness import announce_failure, watch_parent
from weir import options
from weir.options import LogFormat, Switch
from weir.preflight import check_repositories
from weir.start_error import StartError


def gateway(
    nats: options.Nats = None,
    http_address: options.HttpAddress = "127.0.0.1",
    http_port: options.HttpPort = 8000,
    http_max_input_size: options.HttpMaxInputSize = 64 * 1024 * 1024,
    grpc_address: options.GrpcAddress = "127.0.0.1",
    grpc_port: options.GrpcPort = 8001,
    metrics_address: options.MetricsAddress = None,
    metrics_port: options.MetricsPort = 8002,
    id: options.ServerId = "triton",
    gateway_id: options.RoleId = None,
    strict_readiness: options.StrictReadiness = Switch.TRUE,
    exit_timeout_secs: options.ExitTimeoutSecs = 30.0,
    log_format: options.LogFormatOption = LogFormat.TEXT,
    log_verbose: options.LogVerbose = 0,
) -> None:
    """Run one gateway: HTTP, gRPC and metrics in front of the bus."""
    from gateway.settings import GatewaySettings

    settings = GatewaySettings(
        nats_url=_required(nats),
        gateway_id=gateway_id,
        server_id=id,
        http_address=http_address,
        http_port=http_port,
        grpc_address=grpc_address,
        grpc_port=grpc_port,
        metrics_address=metrics_address or http_address,
        metrics_port=metrics_port,
        http_max_input_size=http_max_input_size,
        strict_readiness=strict_readiness.on,
        exit_timeout_secs=exit_timeout_secs,
        log_format=log_format.value,
        log_verbose=log_verbose,
    )
    _run("gateway", settings)


def scheduler(
    nats: options.Nats = None,
    scheduler_id: options.RoleId = None,
    exit_timeout_secs: options.ExitTimeoutSecs = 30.0,
    log_format: options.LogFormatOption = LogFormat.TEXT,
    log_verbose: options.LogVerbose = 0,
) -> None:
    """Run one scheduler: it forms batches and hands them to workers."""
    from scheduler.settings import SchedulerSettings

    settings = SchedulerSettings(
        nats_url=_required(nats),
        scheduler_id=scheduler_id,
        exit_timeout_secs=exit_timeout_secs,
        log_format=log_format.value,
        log_verbose=log_verbose,
    )
    _run("scheduler", settings)


def worker(
    model_repository: options.ModelRepositories = None,
    nats: options.Nats = None,
    worker_id: options.RoleId = None,
    model_config_name: options.ModelConfigName = None,
    disable_auto_complete_config: options.DisableAutoCompleteConfig = Switch.FALSE,
    model_load_thread_count: options.ModelLoadThreadCount = 4,
    exit_on_error: options.ExitOnError = Switch.FALSE,
    exit_timeout_secs: options.ExitTimeoutSecs = 30.0,
    log_format: options.LogFormatOption = LogFormat.TEXT,
    log_verbose: options.LogVerbose = 0,
) -> None:
    """Run one worker: it loads models and executes batches."""
    from worker.settings import WorkerSettings

    settings = WorkerSettings(
        nats_url=_required(nats),
        model_repositories=check_repositories(model_repository),
        worker_id=worker_id,
        model_config_name=model_config_name,
        disable_auto_complete_config=disable_auto_complete_config.on,
        model_load_thread_count=model_load_thread_count,
        exit_on_error=exit_on_error.on,
        exit_timeout_secs=exit_timeout_secs,
        log_format=log_format.value,
        log_verbose=log_verbose,
    )
    _run("worker", settings)


def _required(nats: str | None) -> str:
    if nats is None:
        raise StartError("--nats must be specified")
    return nats


def _run(role: str, settings: Any) -> None:
    watch_parent()
    configure_logging(role, settings.log_format, settings.log_verbose)
    try:
        import_module(f"{role}.main").run(settings)
    except WeirError as error:
        logging.getLogger(f"weir.{role}").error("%s", error.message)
        announce_failure(error.message)
        raise typer.Exit(1) from error
