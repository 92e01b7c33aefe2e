"""`weir serve`: everything in one command, by starting the other commands and minding them."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import typer

from bus.broker_access import without_user
from bus.embedded import EmbeddedNats
from schemas.errors import WeirError
from telemetry.log_settings import LogSettings
from telemetry.logs import configure_logging
from telemetry.readiness import announce_ready
from weir import NATS_URL_VARIABLE
from weir.forked_role import import_roles
from weir.gpu_count import count_gpus
from weir.local_servers import data_home, write_addresses
from weir.options import OPTIONS, SERVE, UsageError, options_of
from weir.options.broker_options import ACCESS_OPTIONS
from weir.options.deprecated import replaced
from weir.parent import parent_fd
from weir.preflight import Listener, check_backend_directories, check_listeners, check_repositories
from weir.role import RoleSpec
from weir.role_commands import check_gateway_options
from weir.start_error import StartError
from weir.startup_block import StartupFacts, render_startup_block
from weir.supervisor import Supervisor

HELP = "Serve model repositories: message bus, scheduler, worker and gateway in one command."

logger = logging.getLogger("weir.serve")

# -P: what lies in the current folder must not be imported in place of our packages.
_WEIR = (sys.executable, "-P", "-m", "weir")
_DRAWN_PORTS = {"http_port": "--http-port", "grpc_port": "--grpc-port", "metrics_port": "--metrics-port"}


class _Door(NamedTuple):
    """One of the gateway's listeners: the prefix of its options, how errors call it, and how the log does."""

    prefix: str
    protocol: str
    service: str


_DOORS = (
    _Door("grpc", "GRPC", "GRPCInferenceService"),
    _Door("http", "HTTP", "HTTPService"),
    _Door("metrics", "metrics", "Metrics Service"),
)


def serve(main: Callable[[Sequence[str]], None], values: dict[str, Any]) -> None:
    """Serve with the values of the options, by key, until told to stop. Raises StartError, UsageError.

    `main` runs a command line: roles are forked off, but for workers with GPUs. What drivers do in this process, which has
    asked one how many GPUs there are, is not theirs.
    """
    values, warnings = replaced(values)
    try:
        configure_logging("supervisor", LogSettings.of(SimpleNamespace(**values)))
    except WeirError as error:
        raise StartError(error.message) from error
    repositories = check_repositories(values["model_repository"], may_be_absent=values["exit_on_error"] is False)
    values["model_repository"] = tuple(map(str, repositories))
    values["backend_directory"] = tuple(map(str, check_backend_directories(values["backend_directory"])))
    listeners = _listeners(values)
    check_listeners([listeners[name] for name in ("http", "grpc", "metrics") if name in listeners])
    for warning in warnings:
        logger.warning("%s", warning)
    for option in OPTIONS:
        if option.ineffective and values[option.key] not in (None, ()):
            logger.info("%s has no effect: %s", option.name, option.ineffective)
    gpus = count_gpus()
    roles = [
        RoleSpec(name="scheduler", argv=_role_command("scheduler", values), drain_rank=1),
        *worker_roles(values, gpus),
        RoleSpec(name="gateway", argv=_role_command("gateway", values), drain_rank=0, kept_facts=_DRAWN_PORTS),
    ]
    is_forked = [gpus == 0 or not role.name.startswith("worker") for role in roles]
    roles = [replace(role, main=main if forked else None) for role, forked in zip(roles, is_forked, strict=True)]
    import_roles()
    check_gateway_options(values)
    nats_url = values["nats"]
    for option in ACCESS_OPTIONS:
        if nats_url is None and values[option.key]:
            raise UsageError(f"{option.name} is for the server that --nats names: the embedded one listens on loopback")
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(parent_fd())
        embedded = None
        if nats_url is None:
            folder = stack.enter_context(_data_dir(values, temporary=parent is not None))
            server = values["nats_server"]
            embedded = EmbeddedNats(folder, Path(server) if server else None, values["nats_port"])
        supervisor = Supervisor(
            roles,
            nats=embedded,
            environment={} if nats_url is None else {NATS_URL_VARIABLE: nats_url},
            on_ready=functools.partial(_report, listeners, nats_url, embedded, bool(values["exit_on_error"])),
            exit_timeout_s=values["exit_timeout_secs"],
            parent_fd=parent,
        )
        status = supervisor.run()
    raise typer.Exit(status)


def _listeners(values: Mapping[str, Any]) -> dict[str, Listener]:
    """The doors that are allowed, by prefix."""
    return {
        door.prefix: Listener(
            door.protocol,
            values[f"{door.prefix}_address"] or values["http_address"],
            values[f"{door.prefix}_port"],
            values.get(f"reuse_{door.prefix}_port", False),
        )
        for door in _DOORS
        if values[f"allow_{door.prefix}"]
    }


def _role_command(role: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The command of `role` with what it takes of our options, where that is not the default.

    The broker's URL is left out: it goes by the environment.
    """
    ours = options_of(SERVE)
    words = [*_WEIR, role]
    for key, option in options_of(role).items():
        if key in ours and key != "nats" and values[key] != option.default:
            words += option.written(values[key])
    return tuple(words)


def worker_roles(values: Mapping[str, Any], gpus: int) -> list[RoleSpec]:
    """The worker; where there are several GPUs one for each, the first of which has the instances that need none too.

    A process of its own for each, because what breaks one GPU for a process is not to break the others.
    """
    if gpus < 2:
        return [RoleSpec(name="worker", argv=_role_command("worker", values), drain_rank=2)]
    roles: list[RoleSpec] = []
    for gpu in range(gpus):
        argv = (*_role_command("worker", values), f"--gpu={gpu}")
        argv += () if gpu == 0 else ("--cpu-instances=false",)
        roles.append(RoleSpec(name=f"worker-{gpu}", argv=argv, drain_rank=2))
    return roles


@contextlib.contextmanager
def _data_dir(values: Mapping[str, Any], temporary: bool) -> Iterator[Path]:
    """The folder for accepted work: the one named, one that goes with this process, or one kept for the port."""
    named = values["data_dir"]
    if named is not None and not named:
        raise UsageError("--data-dir must not be empty")
    # A server without HTTP is known by another of its ports.
    allowed = [door for door in ("http", "grpc", "metrics") if values[f"allow_{door}"]]
    port = values[f"{allowed[0]}_port"] if allowed else 0
    if named:
        yield Path(named)
    elif temporary or port == 0:
        with tempfile.TemporaryDirectory(prefix="weir-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    else:
        yield data_home() / str(port)


def _report(
    listeners: Mapping[str, Listener],
    nats_url: str | None,
    embedded: EmbeddedNats | None,
    ends_on_error: bool,
    facts: Mapping[str, Mapping[str, Any]],
) -> None:
    announced = facts["gateway"]
    if ends_on_error and embedded is not None:
        from schemas.registry import UNLOADED  # it imports numpy, which the parent is not to do before its roles have

        # A worker does not count a model for devices that it lacks as its own failure. Here there are no other workers.
        failed = [model for model in announced.get("models", ()) if model.get("reason", "") not in ("", UNLOADED)]
        if failed:
            raise StartError("; ".join(f"failed to load '{model['name']}': {model['reason']}" for model in failed))
    places = {
        prefix: _place(listener.address, announced.get(f"{prefix}_port", listener.port))
        for prefix, listener in listeners.items()
    }
    for door in _DOORS:
        if door.prefix in places:
            logger.info("Started %s at %s", door.service, places[door.prefix])
    startup = StartupFacts(
        http=places.get("http"),
        grpc=places.get("grpc"),
        metrics=places.get("metrics"),
        nats_url=without_user(embedded.url) if embedded else nats_url or "",
        data_dir=str(embedded.data_dir) if embedded else None,
        nats_url_file=str(embedded.url_file.absolute()) if embedded else "",
        models=announced.get("models", []),
        durability=announced.get("durability", {}),
    )
    if embedded:
        write_addresses(embedded.data_dir, {**places, "nats_url": startup.nats_url})
    announce_ready(**places, nats_url=embedded.url if embedded else startup.nats_url)
    # The server goes on when nobody reads what it prints.
    with contextlib.suppress(OSError):
        print(f"\n{render_startup_block(startup)}\n", flush=True)


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
