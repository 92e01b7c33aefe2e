"""`run`: carries out `weir perf` with the options of the command line, and prints the result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import typer
import uvloop
from rich.console import Console

from weir.commands.local.servers import local_certificate
from weir.commands.running_server import (
    DEFAULT_GRPC,
    DEFAULT_HTTP,
    URL_VARIABLE,
    BrokerChoice,
    none_found_hint,
    only_local_server,
    unwrap_exception_groups,
)
from weir.errors import StartError
from weir.options.api_key import hint_for_denied
from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.administration import Administration, GrpcAdministration, HttpAdministration
from weir.perf.clients.grpc import GrpcClient
from weir.perf.clients.http import HttpClient
from weir.perf.clients.nats import NatsClient
from weir.perf.clients.session import Client, Denied, SampleRequest, Unreachable
from weir.perf.clients.shared_memory import system_region
from weir.perf.inputs.generated import InputOptions
from weir.perf.inputs.model import InputError, has_text_ids, needs_correlation_id, read_model
from weir.perf.inputs.requests import make_requests
from weir.perf.load.arrivals import ArrivalProcess
from weir.perf.load.levels import Level, Mode
from weir.perf.load_test import DEFAULT_SEQUENCE_LENGTH, LoadTest
from weir.perf.measurement.distribution import Window
from weir.perf.measurement.level import Timing
from weir.perf.report.document import LevelReport, PerfReport
from weir.perf.report.plot import PlotUnavailable, check_svg, terminal_plot, write_svg
from weir.perf.report.table import print_report
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.names import model_path
from weir.schemas.core.requests import InferRequest

ANSWERED, NOTHING_ANSWERED, INTERRUPTED = 0, 1, 130
"""Exit statuses."""

_MIN_WIDTH = 80


@dataclass(frozen=True)
class PerfOptions:
    """The options of the command. `sequence_length` None: the default, for models with sequences."""

    model: str
    model_version: str
    protocol: Literal["http", "grpc", "nats"]
    url: str
    broker: BrokerChoice
    headers: Mapping[str, str]
    levels: Sequence[Level]
    arrivals: ArrivalProcess
    max_in_flight: int
    sequence_length: int | None
    wants_streams: bool
    inputs: InputOptions
    input_data: Path | None
    shared_memory: Literal["none", "system"]
    timing: Timing
    timeout_s: float
    as_json: bool
    plot: Path | None


def run(options: PerfOptions) -> int:
    """Measures, prints the result, and returns the exit status. Raises StartError with the reason it can't begin."""
    try:
        if options.plot is not None:
            check_svg(options.plot)
        with unwrap_exception_groups(Exception):
            report, is_local = uvloop.run(_measured(options))
    except Denied as error:
        raise StartError(f"{error}. {hint_for_denied('Authorization' in options.headers)}") from error
    except (InputError, PlotUnavailable, Unreachable) as error:
        raise StartError(str(error)) from error
    if options.as_json:
        print(report.model_dump_json(indent=2))
    else:
        _print(report, is_local)
    if options.plot is not None:
        try:
            write_svg(report, options.plot)
        except OSError as error:
            raise StartError(f"{options.plot} can't be written: {error.strerror}") from error
    if report.interrupted:
        return INTERRUPTED
    return ANSWERED if report.has_answers else NOTHING_ANSWERED


def _print(report: PerfReport, is_local: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(_MIN_WIDTH, console.width)
    print_report(report, console, is_local)
    text = terminal_plot(report, console.width)
    if text:
        print(f"\n{text}")


async def _measured(options: PerfOptions) -> tuple[PerfReport, bool]:
    """The result, and whether the server runs on this machine. Raises InputError, Unreachable, StartError, OSError."""
    place = _place(options)
    address = place.address
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        administration = _administration(options, place)
        stack.push_async_callback(administration.close)
        server = await administration.server()
        model = read_model(await administration.config(options.model, options.model_version))
        streams = _streams(options, model)
        requests = make_requests(model, options.inputs, options.input_data)
        samples = await _samples(options, requests, administration, stack)
        client, url = await _client(options, place, streams, stack)
        try:
            client.load(samples)
        except ValueError as error:
            raise InputError(str(error)) from error
        test = LoadTest(
            model=options.model,
            version=options.model_version,
            levels=options.levels,
            samples=len(samples),
            timing=options.timing,
            arrivals=options.arrivals,
            max_in_flight=options.max_in_flight,
            sequence_length=_sequence_length(options, model),
            has_text_ids=has_text_ids(model),
            streams=streams or model.is_decoupled,
            seed=options.inputs.seed,
        )
        with _stopped_by_interrupt(stop), _Progress() as progress:
            await test.run(client, administration, stop, progress.show)
    mode = options.levels[0].mode
    batch_size = requests[0].batch_size
    report = PerfReport(
        model=options.model,
        model_version=options.model_version,
        server=f"{server.get('name', 'unknown')} {server.get('version', '')}".strip(),
        url=url,
        protocol=options.protocol,
        mode=mode.value,
        arrivals=options.arrivals.value if mode is Mode.RATE else None,
        batch_size=batch_size,
        request_bytes=sum(tensor.size_bytes for tensor in requests[0].inputs),
        sequence_length=test.sequence_length,
        streaming=test.streams,
        shared_memory=options.shared_memory,
        interrupted=stop.is_set(),
        levels=[LevelReport.of(result, batch_size) for result in test.results],
    )
    return report, address.is_local


class _Place(NamedTuple):
    """The server's address for the protocol (of HTTP for NATS), its broker, and a hint if it can't be reached."""

    address: ServerAddress
    broker: BrokerChoice
    hint: str = ""


def _place(options: PerfOptions) -> _Place:
    """The server that the options name, else the only one on this machine, else the default one. Raises StartError."""
    is_grpc, broker, hint = options.protocol == "grpc", options.broker, ""
    url = options.url or ("" if is_grpc else os.environ.get(URL_VARIABLE, ""))
    if not url or broker.data_dir is not None:
        default = DEFAULT_GRPC if is_grpc else DEFAULT_HTTP
        server = only_local_server(broker.data_dir, "--url HOST:PORT")
        if server is None:
            url, hint = default, f"{none_found_hint(default)}--url HOST:PORT."
        else:
            url = server.grpc_place if is_grpc else server.http_place
            if not url:
                protocol = "gRPC" if is_grpc else "HTTP"
                raise StartError(f"the server found on this machine does not serve {protocol} (yet): {server}")
            if broker.data_dir is None:
                typer.echo(f"server found on this machine: {server}", err=True)
            if broker.url is None:
                broker = broker._replace(data_dir=server.data_dir)
    try:
        address = ServerAddress.parse(url)
    except ValueError as error:
        raise StartError(f"--url: {error}") from error
    if address.is_secure:
        address = address._replace(pinned=local_certificate(address.host, address.port))
    return _Place(address, broker, hint)


def _administration(options: PerfOptions, place: _Place) -> Administration:
    if options.protocol == "grpc":
        return GrpcAdministration(place.address, options.headers, place.hint)
    return HttpAdministration(place.address, options.headers, place.hint)


def _streams(options: PerfOptions, model: ModelConfig) -> bool:
    """Whether requests go on gRPC streams. Raises StartError where protocol and model do not fit."""
    if model.is_decoupled and options.protocol == "http":
        raise StartError(
            f"model '{model.name}' is decoupled, and a request over HTTP has one response: use --protocol grpc or nats"
        )
    if options.wants_streams and options.protocol != "grpc":
        raise StartError(f"--streaming needs --protocol grpc, not {options.protocol}")
    return options.protocol == "grpc" and (options.wants_streams or model.is_decoupled)


def _sequence_length(options: PerfOptions, model: ModelConfig) -> int:
    if needs_correlation_id(model):
        return options.sequence_length or DEFAULT_SEQUENCE_LENGTH
    if options.sequence_length is not None:
        raise StartError(f"--sequence-length: model '{model.name}' has no sequences (no sequence_batching)")
    return 0


async def _samples(
    options: PerfOptions, requests: Sequence[InferRequest], administration: Administration, stack: AsyncExitStack
) -> list[SampleRequest]:
    if options.shared_memory == "system":
        return await stack.enter_async_context(system_region(requests, administration))
    return [SampleRequest(request) for request in requests]


async def _client(options: PerfOptions, place: _Place, streams: bool, stack: AsyncExitStack) -> tuple[Client, str]:
    """The client, and the address to which it sends."""
    client: Client
    if options.protocol == "nats":
        bus, url = await stack.enter_async_context(_connected(place.broker))
        nats = NatsClient(bus, options.model, options.model_version, options.timeout_s, options.headers)
        await nats.start()
        return nats, url
    if options.protocol == "grpc":
        client = GrpcClient(
            place.address, options.model, options.model_version, options.headers, options.timeout_s, streams
        )
    else:
        path = f"{model_path(options.model, options.model_version)}/infer"
        client = HttpClient(place.address, path, options.headers, options.timeout_s)
    stack.push_async_callback(client.close)
    return client, str(place.address)


@asynccontextmanager
async def _connected(broker: BrokerChoice) -> AsyncIterator[tuple[Any, str]]:
    """A bus, and the URL of its server without secrets. Raises StartError."""
    from weir.bus.nats.access import without_secrets

    target = broker.target()
    try:
        async with target.connected("weir-perf") as bus:
            yield bus, without_secrets(target.url)
    except OSError as error:
        raise StartError(str(error)) from error


@contextlib.contextmanager
def _stopped_by_interrupt(stop: asyncio.Event) -> Any:
    """The first Ctrl-C ends the test with what was measured; a second one ends the program."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Progress:
    """The last window, on stderr while a person watches."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._status = console.status("warming up") if console.is_terminal and not os.environ.get("CI") else None

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, level: Level, number: int, window: Window) -> None:
        """Shows a window."""
        if self._status is not None:
            failed = f", {window.failed} failed" if window.failed else ""
            self._status.update(
                f"{level}, window {number}: {window.per_s:.0f} requests/s, "
                f"p99 {window.latency.quantile_s(0.99) * 1e3:.1f} ms{failed}"
            )
