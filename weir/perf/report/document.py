"""`PerfReport`: the result of a load test as one JSON object, which `weir perf --json` prints.

`version` rises when a field changes its meaning or goes; fields may be added at any time.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from weir.perf.load.levels import Mode
from weir.perf.measurement.distribution import Distribution
from weir.perf.measurement.level import LevelResult
from weir.perf.measurement.server_statistics import ServerFigures

FORMAT_VERSION: Literal[1] = 1


def _field(description: str, default: object = ...) -> object:
    return Field(default, description=description)


class Durations(BaseModel):
    """Durations in milliseconds; quantiles are within 1 %."""

    avg: Annotated[float, _field("their mean")]
    p50: Annotated[float, _field("the median")]
    p90: Annotated[float, _field("the 90th percentile")]
    p95: Annotated[float, _field("the 95th percentile")]
    p99: Annotated[float, _field("the 99th percentile")]
    max: Annotated[float, _field("the longest")]

    @classmethod
    def of(cls, distribution: Distribution) -> Durations | None:
        """Those of `distribution`; None if it is empty."""
        if not distribution.count:
            return None
        p50, p90, p95, p99 = (_ms(distribution.quantile_s(share)) for share in (0.5, 0.9, 0.95, 0.99))
        return cls(avg=_ms(distribution.mean_s), p50=p50, p90=p90, p95=p95, p99=p99, max=_ms(distribution.max_s))


class ErrorCount(BaseModel):
    """Requests that failed in the same way."""

    text: Annotated[str, _field("the server's text, or why there was no answer")]
    count: Annotated[int, _field("how many")]


class ServerReport(BaseModel):
    """What the server did meanwhile: the difference of its statistics of the model before and after, for all clients."""

    inferences: Annotated[int, _field("rows that were inferred")]
    executions: Annotated[int, _field("runs of the model")]
    batch_size: Annotated[float, _field("rows of a run on average")]
    batch_sizes: Annotated[dict[str, int], _field("number of runs by number of rows")]
    queue_ms: Annotated[float, _field("mean time of a request in the queue")]
    compute_input_ms: Annotated[float, _field("mean time in which inputs were put together")]
    compute_infer_ms: Annotated[float, _field("mean time in which the model ran")]
    compute_output_ms: Annotated[float, _field("mean time in which outputs were taken apart")]
    cache_hits: Annotated[int, _field("requests answered from the response cache")]

    @classmethod
    def of(cls, figures: ServerFigures | None) -> ServerReport | None:
        """Those of `figures`."""
        if figures is None:
            return None
        return cls(
            inferences=figures.inferences,
            executions=figures.executions,
            batch_size=round(figures.batch_size, 3),
            batch_sizes={str(size): count for size, count in figures.batches.items()},
            queue_ms=round(figures.queue_ms, 4),
            compute_input_ms=round(figures.compute_input_ms, 4),
            compute_infer_ms=round(figures.compute_infer_ms, 4),
            compute_output_ms=round(figures.compute_output_ms, 4),
            cache_hits=figures.cache_hits,
        )


class ClientReport(BaseModel):
    """The condition of the load generator itself."""

    is_limit: Annotated[bool, _field("whether the client and not the server limited the throughput")]
    limits: Annotated[list[str], _field("why, one text for each reason")]
    loop_cpu: Annotated[float, _field("share of one processor that its event loop used")]
    process_cpu: Annotated[float, _field("processors that its process used; may be above 1")]
    machine_cpu: Annotated[float, _field("busy share of all processors of the client's machine")]
    loop_lag_p90_ms: Annotated[float, _field("how late timers of its event loop were (p90)")]
    send_delay_p99_ms: Annotated[float, _field("delay of requests of a rate in the client (p99); else 0")]


class LevelReport(BaseModel):
    """One level of load."""

    concurrency: Annotated[int | None, _field("requests in flight; null for a rate")]
    rate: Annotated[float | None, _field("requests per second that were due; null for a concurrency")]
    seconds: Annotated[float, _field("length of the windows that count, together")]
    windows: Annotated[int, _field("number of windows that count")]
    stable: Annotated[bool, _field("whether throughput and median latency of these windows agree")]
    interrupted: Annotated[bool, _field("whether the measurement was ended early")]
    succeeded: Annotated[int, _field("requests that were answered")]
    failed: Annotated[int, _field("requests that failed")]
    unanswered: Annotated[int, _field("requests that were cancelled at the end of the level")]
    requests_per_s: Annotated[float, _field("answered requests per second")]
    inferences_per_s: Annotated[float, _field("answered rows per second: requests times the batch size")]
    responses_per_s: Annotated[float, _field("responses per second; more than requests for decoupled models")]
    latency_ms: Annotated[
        Durations | None,
        _field(
            "from sending a request, with a rate from when it was due, to its last response; null without responses"
        ),
    ]
    first_response_ms: Annotated[Durations | None, _field("the same to the first response; null without streams")]
    between_responses_ms: Annotated[
        Durations | None, _field("between two responses of a request; null without streams, or with one response each")
    ]
    errors: Annotated[
        list[ErrorCount],
        _field(
            "failed requests by text, the most frequent first; at most 21. Texts that differ in numbers only are one"
        ),
    ]
    server: Annotated[ServerReport | None, _field("null where the server's statistics can't be read")]
    client: Annotated[ClientReport, _field("whether the client kept up")]

    @property
    def load(self) -> str:
        """The concurrency or the rate, as text."""
        return f"{self.concurrency if self.concurrency is not None else self.rate:g}"

    @classmethod
    def of(cls, result: LevelResult, batch_size: int) -> LevelReport:
        """The report of one level of requests of `batch_size` rows."""
        window, level, client = result.window, result.level, result.client
        is_concurrency = level.mode is Mode.CONCURRENCY
        per_s = window.seconds or 1.0
        return cls(
            concurrency=int(level.value) if is_concurrency else None,
            rate=None if is_concurrency else level.value,
            seconds=round(window.seconds, 3),
            windows=result.windows,
            stable=result.is_stable,
            interrupted=result.is_interrupted,
            succeeded=window.succeeded,
            failed=window.failed,
            unanswered=result.unanswered,
            requests_per_s=round(window.per_s, 3),
            inferences_per_s=round(window.per_s * batch_size, 3),
            responses_per_s=round(window.responses / per_s, 3),
            latency_ms=Durations.of(window.latency),
            first_response_ms=Durations.of(window.first_response),
            between_responses_ms=Durations.of(window.between_responses),
            errors=[ErrorCount(text=text, count=count) for text, count in window.errors.most_common()],
            server=ServerReport.of(result.server),
            client=ClientReport(
                is_limit=bool(result.client_limits),
                limits=result.client_limits,
                loop_cpu=round(client.loop_cpu, 3),
                process_cpu=round(client.process_cpu, 3),
                machine_cpu=round(client.machine_cpu, 3),
                loop_lag_p90_ms=_ms(client.lag_p90_s),
                send_delay_p99_ms=_ms(window.send_delay.quantile_s(0.99)),
            ),
        )


class PerfReport(BaseModel):
    """A load test of one model."""

    version: Annotated[Literal[1], _field("of this format", FORMAT_VERSION)] = FORMAT_VERSION
    model: Annotated[str, _field("name of the model")]
    model_version: Annotated[str, _field("the version that was requested; empty for the server's choice")]
    server: Annotated[str, _field("name and version of the server")]
    url: Annotated[str, _field("the address to which requests were sent")]
    protocol: Annotated[Literal["http", "grpc", "nats"], _field("how requests were sent")]
    mode: Annotated[Literal["concurrency", "rate"], _field("what the levels are")]
    arrivals: Annotated[Literal["poisson", "constant"] | None, _field("how requests of a rate arrive; null otherwise")]
    batch_size: Annotated[int, _field("rows of a request")]
    request_bytes: Annotated[int, _field("bytes of the inputs of the first request")]
    sequence_length: Annotated[int, _field("requests of a sequence; 0 without sequences")]
    streaming: Annotated[bool, _field("whether responses came on a stream")]
    shared_memory: Annotated[Literal["none", "system"], _field("where the inputs lay")]
    interrupted: Annotated[bool, _field("whether the test was ended early")]
    levels: Annotated[list[LevelReport], _field("one for each level, in the order in which they were measured")]

    @property
    def has_answers(self) -> bool:
        """Whether any request was answered."""
        return any(level.succeeded for level in self.levels)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
