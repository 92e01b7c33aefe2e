"""`weir serve`: runs nats-server and all roles under one supervisor.

The module checks the options, counts the GPUs, builds the command lines of the roles, and prints the startup
block (`render_startup_block`) once all roles are ready.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import typer

from weir import NATS_URL_VARIABLE, __version__
from weir.bus.nats.access import without_user
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.cluster.access.exposure import Exposure
from weir.commands.gpu_count import count_gpus
from weir.commands.local.certificates import NO_TLS, ServedTls, check_self_signed, self_signed_values
from weir.commands.local.data_folders import DataFolder, default_data_dir
from weir.commands.local.servers import ServerRegistration
from weir.commands.preflight import (
    Listener,
    check_agent_directory,
    check_backend_directories,
    check_listeners,
    check_port_range,
    check_repositories,
)
from weir.commands.roles import check_access_policy, check_gateway_options, warn_of_secrets
from weir.commands.serve_roles import (
    console_role,
    gateway_roles,
    role_command,
    role_names,
    role_secrets,
    share_memory,
    sizes_of_streams,
    worker_roles,
)
from weir.commands.terminal import one_line
from weir.console import DEFAULT_PORT as CONSOLE_PORT
from weir.errors import StartError
from weir.options import OPTIONS, UsageError
from weir.options.broker import ACCESS_OPTIONS
from weir.options.deprecated import replaced
from weir.options.platforms import platform_repositories
from weir.repository.stores.addresses import is_cloud_address
from weir.runtime.limits.open_files import raise_open_files
from weir.runtime.limits.process_limits import find_limits, log_limits, show_bytes
from weir.runtime.processors import processor_count, processors_by_core
from weir.runtime.readiness import announce_ready
from weir.schemas.core.errors import WeirError
from weir.server_process import parent_fd
from weir.supervisor.forked_role import import_roles, importing
from weir.supervisor.processes import ProcessCounts, count_processes, divide_processors
from weir.supervisor.role import RoleSpec
from weir.supervisor.supervisor import Supervisor
from weir.telemetry.log_settings import LogOptions, LogSettings
from weir.telemetry.logs import configure_logging

logger = logging.getLogger("weir.serve")


class _Frontend(NamedTuple):
    """One of the gateway's listeners: the prefix of its options, its name in errors, and its name in the log."""

    prefix: str
    protocol: str
    service: str


_FRONTENDS = (
    _Frontend("grpc", "GRPC", "GRPCInferenceService"),
    _Frontend("http", "HTTP", "HTTPService"),
    _Frontend("metrics", "metrics", "Metrics Service"),
    _Frontend("sagemaker", "SageMaker", "Sagemaker HTTPService"),
    _Frontend("vertex_ai", "Vertex AI", "Vertex AI HTTPService"),
)


def serve(main: Callable[[Sequence[str]], None], values: dict[str, Any]) -> None:
    """Serve with the values of the options, by key, until a stop signal. Raises StartError, UsageError.

    `main` runs a command line in forked roles. Workers with GPUs are started as new processes instead, because this
    process has initialised a GPU driver library to count the GPUs.
    """
    values, warnings = replaced(values)
    values["model_repository"] = values["model_repository"] or platform_repositories(values, os.environ)
    try:
        configure_logging(
            "supervisor", LogSettings.of(LogOptions(**{field.name: values[field.name] for field in fields(LogOptions)}))
        )
    except WeirError as error:
        raise StartError(error.message) from error
    repositories = check_repositories(values["model_repository"], may_be_absent=values["exit_on_error"] is False)
    values["model_repository"] = tuple(map(str, repositories))
    values["backend_directory"] = tuple(map(str, check_backend_directories(values["backend_directory"])))
    values["repoagent_directory"] = check_agent_directory(values["repoagent_directory"])
    check_self_signed(values)
    listeners = listeners_of(values)
    safe_ports = values["sagemaker_safe_port_range"]
    if safe_ports is not None and "sagemaker" in listeners:
        check_port_range([place for name, place in listeners.items() if name != "sagemaker"], *safe_ports)
    order = ("http", "grpc", "metrics", "sagemaker", "vertex_ai")
    taken = [listeners[name] for name in order if name in listeners]
    check_listeners(taken)
    console = console_listener(values, taken)
    exposure = exposure_of(values, listeners, console)
    if values["require_access_policy"] and exposure.refusal():
        raise StartError(exposure.refusal())
    for warning in warnings:
        logger.warning("%s", warning)
    for option in OPTIONS:
        if option.ineffective and values[option.key] not in (None, ()):
            logger.info("%s has no effect: %s", option.name, option.ineffective)
    raise_open_files()  # roles and nats-server inherit it
    with contextlib.ExitStack() as stack:
        _serve(main, values, listeners, console, stack)


def _serve(
    main: Callable[[Sequence[str]], None],
    values: dict[str, Any],
    listeners: Mapping[str, Listener],
    console: Listener | None,
    stack: contextlib.ExitStack,
) -> None:
    """Serve with checked values; `stack` removes temporary folders at the end."""
    nats_url = values["nats"]
    parent = stack.enter_context(parent_fd())
    needs_cache = values["model_cache_dir"] is None and any(map(is_cloud_address, values["model_repository"]))
    data = None
    if nats_url is None or needs_cache or values["tls_self_signed"]:
        data = stack.enter_context(_data_dir(values, temporary=parent is not None))
    if data is not None and needs_cache:
        # A worker that is started again finds what the one before it has downloaded, even while the store is unreachable.
        values["model_cache_dir"] = str((data.path / "models").absolute())
    if data is not None and values["tls_self_signed"]:
        doors = [*listeners.values(), *([console] if console is not None else [])]
        values = {**values, **self_signed_values(data.path, doors)}
    embedded = _embedded_nats(values, data.path if data is not None else None) if nats_url is None else None
    gpus, processors = count_gpus(), processor_count()
    counts = count_processes(values, processors, gpus)
    shares = divide_processors(values["worker_processors"], processors_by_core(), processors, counts)
    durable_id = secrets.token_hex(4)
    with importing():
        check_gateway_options(values)
        check_access_policy(values["access_policy"])
        memory = share_memory(values, counts, console is not None)
        values = {**values, **memory.payloads}
        if embedded is not None:
            values |= sizes_of_streams(values, _store_bytes(embedded))
        gateways = gateway_roles({**values, **memory.gateways}, counts.gateways, durable_id)
    warn_of_secrets(logger)  # not before the checks: a command line that is wrong has one line of output
    roles = [
        # The worker first: it has the most to do until it is ready.
        *worker_roles(values, gpus, counts.workers, shares),
        *(
            RoleSpec(
                name=name,
                argv=role_command("scheduler", values),
                environment=role_secrets("scheduler", values),
                drain_rank=1,
            )
            for name in role_names("scheduler", counts.schedulers)
        ),
        RoleSpec(
            name="durable",
            argv=(*role_command("durable", {**values, **memory.durable}), f"--durable-id={durable_id}"),
            environment=role_secrets("durable", values),
            drain_rank=0,
        ),
        *gateways,
        *([console_role(values, console)] if console is not None else []),
    ]
    roles = [role if gpus and role.name.startswith("worker") else _forked(role, main) for role in roles]
    _log_limits(counts, embedded)
    if shares is not None:
        # What this process starts inherits it; workers get their own.
        os.sched_setaffinity(0, shares.others)
    registration = ServerRegistration(embedded.data_dir if embedded else None, nats_url or "")
    stack.callback(registration.remove)
    report = functools.partial(
        _report,
        gateways[0].name,
        listeners,
        console,
        nats_url,
        embedded,
        values["exit_on_error"],
        registration,
        _notes(values, listeners, console, data),
        ServedTls.of(values),
    )
    supervisor = Supervisor(
        roles,
        nats=embedded,
        environment={} if nats_url is None else {NATS_URL_VARIABLE: nats_url},
        on_ready=report,
        exit_timeout_s=values["exit_timeout_secs"],
        parent_fd=parent,
    )
    raise typer.Exit(supervisor.run())


def _embedded_nats(values: Mapping[str, Any], folder: Path | None) -> EmbeddedNats:
    """The nats-server to start with this data folder. Raises UsageError for options of another one, and StartError."""
    for option in ACCESS_OPTIONS:
        if values[option.key]:
            raise UsageError(f"{option.name} requires --nats: the embedded nats-server listens on loopback only")
    assert folder is not None  # noqa: S101 - there is one without --nats
    server = values["nats_server"]
    return EmbeddedNats(folder, Path(server) if server else None, values["nats_port"])


def _store_bytes(embedded: EmbeddedNats) -> int:
    try:
        return embedded.store_bytes
    except OSError as error:
        raise StartError(f"data folder {embedded.data_dir} can't be used: {error.strerror or error}") from error


def _log_limits(counts: ProcessCounts, embedded: EmbeddedNats | None) -> None:
    used = {name: str(count) for name, count in counts._asdict().items()}
    if embedded is not None:
        used |= {"threads_of_nats_server": str(embedded.threads), "its_storage": show_bytes(embedded.store_bytes)}
    log_limits(logger, find_limits(), **used)


def _forked(role: RoleSpec, main: Callable[[Sequence[str]], None]) -> RoleSpec:
    """`role` in a fork of this process, which imports its code first."""
    return replace(role, main=main, prepare=functools.partial(import_roles, (role.name.partition("-")[0],)))


def listeners_of(values: Mapping[str, Any]) -> dict[str, Listener]:
    """The enabled listeners by prefix."""
    return {
        door.prefix: Listener(
            door.protocol,
            values[f"{door.prefix}_address"] or values["http_address"],
            values[f"{door.prefix}_port"],
            values.get(f"reuse_{door.prefix}_port", False),
        )
        for door in _FRONTENDS
        if values[f"allow_{door.prefix}"]
    }


def console_listener(values: Mapping[str, Any], others: Sequence[Listener]) -> Listener | None:
    """Where the console listens; None where none is to be started.

    Without a chosen port it is an extra that never keeps a server from starting: it takes a free port (0) where the default
    one is taken, and there is none where the server's own ports are drawn. Raises StartError if the chosen port is taken.
    """
    port = values["console_port"]
    if not values["allow_console"] or (port is None and values["http_port"] == 0):
        return None
    listener = Listener("console", values["console_address"], CONSOLE_PORT if port is None else port)
    try:
        check_listeners([*others, listener])
    except StartError:
        if port is not None:
            raise
    else:
        return listener
    drawn = listener._replace(port=0)
    try:
        check_listeners([drawn])
    except StartError as error:
        logger.warning("there is no console: %s; choose another address with --console-address", error)
        return None
    return drawn


def exposure_of(values: Mapping[str, Any], listeners: Mapping[str, Listener], console: Listener | None) -> Exposure:
    """What other hosts can reach of this server. The roles log it; the startup block repeats it."""
    addresses = {listener.protocol: listener.address for listener in listeners.values()}
    if console is not None:
        addresses["the console"] = console.address
    return Exposure.of(addresses, SimpleNamespace(**values))


@contextlib.contextmanager
def _data_dir(values: Mapping[str, Any], temporary: bool) -> Iterator[DataFolder]:
    """The data folder: the given one, a temporary one, or the permanent one of the project and the HTTP port."""
    named = values["data_dir"]
    if named is not None and not named:
        raise UsageError("--data-dir must not be empty")
    # Without HTTP, the folder is named after another port.
    allowed = [door for door in ("http", "grpc", "vertex_ai", "sagemaker", "metrics") if values[f"allow_{door}"]]
    port = values[f"{allowed[0]}_port"] if allowed else 0
    if named:
        yield DataFolder(Path(named))
    elif temporary or port == 0:
        with tempfile.TemporaryDirectory(prefix="weir-", ignore_cleanup_errors=True) as folder:
            yield DataFolder(Path(folder))
    else:
        yield default_data_dir(port)


class _Notes(NamedTuple):
    """What the startup block says behind the console and the data folder, and about access, "" for nothing.

    `files` are those of the access options, as commands read them.
    """

    console: str
    data: str
    access: str
    files: Mapping[str, str]


def _notes(
    values: Mapping[str, Any], listeners: Mapping[str, Listener], console: Listener | None, data: DataFolder | None
) -> _Notes:
    is_moved = console is not None and console.port == 0 and values["console_port"] is None
    return _Notes(
        console=f"port {CONSOLE_PORT} is taken" if is_moved else "",
        data="of the HTTP port, as in earlier releases" if data is not None and data.is_of_port else "",
        access=": ".join(filter(None, (values["access_policy"], exposure_of(values, listeners, console).warning()))),
        files={name: str(Path(values[name]).absolute()) for name in _ACCESS_FILES if values[name]},
    )


_ACCESS_FILES = ("access_policy", "access_keys")
"""Options whose files commands look for."""


def _report(  # noqa: PLR0913 - of one call
    gateway: str,
    listeners: Mapping[str, Listener],
    console: Listener | None,
    nats_url: str | None,
    embedded: EmbeddedNats | None,
    ends_on_error: bool | None,
    registration: ServerRegistration,
    notes: _Notes,
    tls: ServedTls,
    facts: Mapping[str, Mapping[str, Any]],
) -> None:
    announced = facts[gateway]
    if ends_on_error and embedded is not None:
        from weir.schemas.wire.registry import (
            UNLOADED,  # imported late: it imports numpy, which must not be loaded in the supervisor before its roles start
        )

        # A worker does not count models for devices it lacks as failures; here no other worker can serve them.
        failed = [model for model in announced.get("models", ()) if model.get("reason", "") not in ("", UNLOADED)]
        if failed:
            raise StartError("; ".join(f"failed to load '{model['name']}': {model['reason']}" for model in failed))
    places = {
        prefix: _format_address(listener.address, announced.get(f"{prefix}_port", listener.port))
        for prefix, listener in listeners.items()
    }
    for door in _FRONTENDS:
        if door.prefix in places:
            logger.info("Started %s at %s", door.service, places[door.prefix])
    shown = facts.get("console", {}) if console is not None else {}
    if console is not None and "console_port" in shown:
        places["console"] = _format_address(console.address, shown["console_port"])
        logger.info("Started the console at %s", places["console"])
    startup = StartupFacts(
        http=places.get("http"),
        grpc=places.get("grpc"),
        metrics=places.get("metrics"),
        console=places.get("console"),
        console_note=notes.console,
        platforms={door.protocol: places[door.prefix] for door in _FRONTENDS[3:] if door.prefix in places},
        nats_url=without_user(embedded.url) if embedded else nats_url or "",
        data_dir=str(embedded.data_dir) if embedded else None,
        data_note=notes.data,
        nats_url_file=str(embedded.url_file.absolute()) if embedded else "",
        models=announced.get("models", []),
        durability=announced.get("durability", {}),
        client_memory=announced.get("client_memory", ""),
        access=notes.access,
        tls=tls,
    )
    registration.announce({**places, **notes.files, **tls.announced(), "nats_url": startup.nats_url})
    announce_ready(**places, **tls.announced(), nats_url=embedded.url if embedded else startup.nats_url)
    # The server continues if its standard output is closed.
    with contextlib.suppress(OSError):
        print(f"\n{render_startup_block(startup)}\n", flush=True)


def _format_address(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


_NOT_ALLOWED = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupFacts:
    """The facts printed at startup: addresses as `host:port` (None: not enabled), and models as the gateway announces them.

    `data_dir` is None with an external broker. `nats_url_file` is the path of the file with the broker's URL and password,
    "" with an external broker. `durability` has the keys `ack_is_fsync` (None: unknown) and `reason`. `platforms` has the
    address of the frontend of each managed service. `client_memory` says which shared memory clients may name, "" for none.
    `access` is the access policy, or what is wrong with access, "" for nothing to say.
    `tls` has the certificates of the ports. `console_note` and `data_note` say why the console and the data folder are
    where they are, "" where that is the rule.
    """

    http: str | None
    grpc: str | None
    metrics: str | None
    console: str | None = None
    console_note: str = ""
    nats_url: str
    data_dir: str | None
    data_note: str = ""
    nats_url_file: str = ""
    models: Sequence[Mapping[str, Any]]
    durability: Mapping[str, Any]
    platforms: Mapping[str, str] = field(default_factory=dict)
    client_memory: str = ""
    access: str = ""
    tls: ServedTls = NO_TLS


def render_startup_block(facts: StartupFacts) -> str:
    """The startup block as plain text without a final newline; texts of models are made printable."""
    http = facts.tls.http_scheme
    rows = [
        ("HTTP", f"{http}://{facts.http}" if facts.http else _NOT_ALLOWED),
        ("gRPC", facts.tls.of_grpc(facts.grpc) if facts.grpc else _NOT_ALLOWED),
        ("metrics", f"{http}://{facts.metrics}/metrics" if facts.metrics else _NOT_ALLOWED),
        *([("console", _noted(f"{http}://{facts.console}", facts.console_note))] if facts.console else []),
        *((service, f"{http}://{address}") for service, address in facts.platforms.items()),
        *facts.tls.rows(facts.http),
        ("NATS", _without_password(facts.nats_url)),
        *([("NATS access", facts.nats_url_file)] if facts.nats_url_file else []),
        *([("client shm", facts.client_memory)] if facts.client_memory else []),
        *([("access", facts.access)] if facts.access else []),
        ("durability", _durability(facts.durability)),
        ("data", _noted(facts.data_dir or "in the external NATS server", facts.data_note)),
    ]
    return "\n".join([_headline(facts.models), "", *_columns(rows), "", *_columns(_model_rows(facts.models))])


def _noted(text: str, note: str) -> str:
    return f"{text} ({note})" if note else text


def _headline(models: Sequence[Mapping[str, Any]]) -> str:
    """The first line; it says "ready" only if every model is ready."""
    missing = sum(model.get("state") != "READY" for model in models)
    if not missing:
        return f"Weir {__version__} is ready"
    verb = "is" if missing == 1 else "are"
    return f"Weir {__version__} has started, but {missing} of {len(models)} models {verb} not ready"


def _durability(announced: Mapping[str, Any]) -> str:
    is_fsync = announced.get("ack_is_fsync")
    if is_fsync is True:
        return "ack = fsync: yes"
    return f"ack = fsync: {'no' if is_fsync is False else 'unknown'} ({announced.get('reason', '')})"


def _model_rows(models: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    if not models:
        return [("no models",)]
    rows = [
        (
            str(model["name"]),
            ",".join(map(str, model.get("versions", ()))) or "-",
            str(model.get("state", "")),
            str(model.get("reason", "")),
        )
        for model in models
    ]
    return [("model", "version", "state", "reason" if any(row[3] for row in rows) else ""), *rows]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    printable = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*printable, strict=True)]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in printable
    ]


def _without_password(url: str) -> str:
    # One URL may name several servers, separated by commas, and needs no scheme.
    return ",".join(_IDENTITY.sub("***@", part, 1) for part in url.split(","))


_IDENTITY = re.compile(r"(?:(?<=://)|^(?!\w+://)).*@")
