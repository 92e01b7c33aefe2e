"""`weir perf MODEL`: a load test of one model of a running server, Weir or Triton.

The measurement itself is in package `perf`. Here are the options, the choice of the server, and the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weir.commands.completion import complete_model
from weir.commands.running_server import BrokerChoice, with_broker_choice
from weir.options.api_key import ApiKey, authorization
from weir.options.option import UsageError
from weir.options.secret import text_of
from weir.options.values import BadValue
from weir.perf.load.arrivals import ArrivalProcess
from weir.perf.load.levels import Level, Mode, parse_levels


class PerfProtocol(StrEnum):
    """How requests are sent."""

    HTTP = "http"
    GRPC = "grpc"
    NATS = "nats"


class SharedMemoryKind(StrEnum):
    """Where the inputs of requests lie."""

    NONE = "none"
    SYSTEM = "system"


_LOAD, _INPUT, _MEASUREMENT, _OUTPUT = "Load", "Requests", "Measurement", "Output"


@with_broker_choice
def perf(  # noqa: PLR0913 - options of a command
    broker: BrokerChoice,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.", autocompletion=complete_model)],
    model_version: Annotated[
        str, typer.Option(metavar="VERSION", help="Version of the model. Default: the server's choice.")
    ] = "",
    protocol: Annotated[PerfProtocol, typer.Option(help="How requests are sent.")] = PerfProtocol.HTTP,
    url: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="The server's address for HTTP, or with --protocol grpc for gRPC; https:// and grpcs:// before it "
            "encrypt. With --protocol nats the model is looked up there over HTTP. Default: for HTTP the variable "
            "WEIR_URL, else that of the weir serve on this machine, else localhost:8000 or :8001.",
        ),
    ] = "",
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:VALUE|@FILE", help="A header, in gRPC metadata, of each request; may be repeated."),
    ] = None,
    api_key: ApiKey = "",
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="LEVELS",
            rich_help_panel=_LOAD,
            help="Requests in flight: 4, or levels as 1,2,8, 1:8, 10:100:10 or 1:64:x2. Default: 1.",
        ),
    ] = "",
    rate: Annotated[
        str,
        typer.Option(
            metavar="LEVELS",
            rich_help_panel=_LOAD,
            help="Requests per second, whether or not earlier ones are answered: 100, or levels as 100:1000:100.",
        ),
    ] = "",
    arrivals: Annotated[
        ArrivalProcess, typer.Option(rich_help_panel=_LOAD, help="How requests of a rate are distributed in time.")
    ] = ArrivalProcess.POISSON,
    max_in_flight: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            min=1,
            max=10_000,
            rich_help_panel=_LOAD,
            help="With --rate: further requests wait in the client.",
        ),
    ] = 1000,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            min=1,
            rich_help_panel=_LOAD,
            help="Requests of a sequence, for models with sequences; each request in flight belongs to another one. "
            "Default: 20.",
        ),
    ] = None,
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming", rich_help_panel=_LOAD, help="Send on gRPC streams; always so for decoupled models over gRPC."
        ),
    ] = False,
    batch_size: Annotated[
        int, typer.Option(metavar="COUNT", min=1, rich_help_panel=_INPUT, help="Rows of a request.")
    ] = 1,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT:DIMS",
            rich_help_panel=_INPUT,
            help="Shape of an input with variable dimensions, without the batch dimension: IMAGE:3,224,224. Repeatable.",
        ),
    ] = None,
    string_length: Annotated[
        int,
        typer.Option(metavar="BYTES", min=0, max=1 << 20, rich_help_panel=_INPUT, help="Length of generated strings."),
    ] = 16,
    zeros: Annotated[
        bool, typer.Option("--zeros", rich_help_panel=_INPUT, help="Send zeros and empty strings, not random values.")
    ] = False,
    input_data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_INPUT,
            help="Send the content of this file: a KServe request in JSON, or data for perf_analyzer.",
        ),
    ] = None,
    shared_memory: Annotated[
        SharedMemoryKind, typer.Option(rich_help_panel=_INPUT, help="Place inputs in shared memory with the server.")
    ] = SharedMemoryKind.NONE,
    measure: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, rich_help_panel=_MEASUREMENT, help="Length of a window.")
    ] = 2.0,
    warmup: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.0, rich_help_panel=_MEASUREMENT, help="Before the windows of each level."
        ),
    ] = 0.5,
    stability: Annotated[
        float,
        typer.Option(
            metavar="PERCENT",
            min=0.1,
            max=100.0,
            rich_help_panel=_MEASUREMENT,
            help="A level is measured until throughput and median latency of three windows differ by at most this.",
        ),
    ] = 10.0,
    max_windows: Annotated[
        int,
        typer.Option(metavar="COUNT", min=1, max=1000, rich_help_panel=_MEASUREMENT, help="Most windows of a level."),
    ] = 10,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.1, rich_help_panel=_MEASUREMENT, help="After which a request has failed."
        ),
    ] = 30.0,
    seed: Annotated[
        int,
        typer.Option(
            metavar="NUMBER", min=0, rich_help_panel=_MEASUREMENT, help="Equal seeds give equal inputs and arrivals."
        ),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="Print one JSON object (docs/perf.md).")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg",
            rich_help_panel=_OUTPUT,
            help="Also write latency against throughput to this file; needs matplotlib.",
        ),
    ] = None,
) -> None:
    """Send requests to a model and measure throughput and latency.

    The server may be Weir or Triton. Exit status: 0 some requests were answered, 1 none, 130 interrupted.
    """
    # Imported when the command runs, so that other commands start faster.
    from weir.commands.perf.run import PerfOptions, run
    from weir.perf.inputs.generated import InputOptions
    from weir.perf.load.stability import StabilityRule
    from weir.perf.measurement.level import Timing

    shapes = _shapes(shape or ())
    options = PerfOptions(
        model=model,
        model_version=model_version,
        protocol=protocol.value,
        url=url,
        broker=broker,
        headers={**_headers(header or ()), **authorization(api_key)},
        levels=_levels(concurrency, rate),
        arrivals=arrivals,
        max_in_flight=max_in_flight,
        sequence_length=sequence_length,
        wants_streams=streaming,
        inputs=InputOptions(batch_size, shapes, string_length, zeros, seed),
        input_data=input_data,
        shared_memory=shared_memory.value,
        timing=Timing(warmup, measure, StabilityRule(stability / 100, max_windows)),
        timeout_s=timeout,
        as_json=as_json,
        plot=plot,
    )
    raise typer.Exit(run(options))


def _levels(concurrency: str, rate: str) -> list[Level]:
    if concurrency and rate:
        raise UsageError("--concurrency and --rate exclude each other")
    try:
        return parse_levels(Mode.RATE, rate) if rate else parse_levels(Mode.CONCURRENCY, concurrency or "1")
    except ValueError as error:
        raise UsageError(f"--{'rate' if rate else 'concurrency'}: {error}") from error


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers = dict[str, str]()
    for text in given:
        try:
            name, colon, value = text_of(text).partition(":")
        except BadValue as error:
            raise UsageError(f"--header: {error}") from None
        if not colon or not name.strip() or not (name + value).isprintable():
            raise UsageError(f"--header takes NAME:VALUE, not {text!r}")
        headers[name.strip()] = value.strip()
    return headers


def _shapes(given: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes = dict[str, tuple[int, ...]]()
    for text in given:
        name, _, dims = text.rpartition(":")
        try:
            shape = tuple(int(dim) for dim in dims.split(",") if dim)
        except ValueError:
            shape = (-1,)
        if not name or min(shape, default=0) < 0:
            raise UsageError(f"--shape takes INPUT:DIMS, as in IMAGE:3,224,224, not {text!r}")
        shapes[name] = shape
    return shapes
