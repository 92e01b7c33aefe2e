"""Writes the parts of the documentation that follow from the code: `make docs`.

Each lies between two marker lines of a page. A test compares pages with what is generated here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from docs.compatibility_rows import ENDPOINTS, METHODS, METRICS, Row, config_fields
from docs.scheduler_pictures import SCENARIOS, part_of, pictures
from schemas.abandoned import AbandonedRequests
from schemas.messages import BatchEntry, BatchMessage, Done, Part
from weir.options import SERVE, Option, options_of

DOCS = Path(__file__).parent


def serve_options() -> str:
    """Tables of the options of `weir serve`, by group."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for option in options_of(SERVE).values():
        names = ", ".join(f"`{name}`" for name in option.names)
        groups.setdefault(option.panel, []).append((names, _default(option), option.help))
    tables = []
    for group, rows in groups.items():
        if any(default for _, default, _ in rows):
            table = _table(("option", "default", "meaning"), rows)
        else:
            table = _table(("option", "meaning"), [(names, meaning) for names, _, meaning in rows])
        tables.append(f"**{group}**\n\n{table}")
    return "\n\n".join(tables)


def options_beside_triton() -> str:
    """A table of Triton's options: which are the same, which are not and how, which are absent and why."""
    rows = []
    for option in options_of(SERVE).values():
        if option.refused:
            kind, how = "absent", f"Refused: {option.refused}."
        elif option.ineffective:
            kind, how = "absent", f"Accepted without effect: {option.ineffective}."
        elif option.differs:
            kind, how = "different", option.differs
        else:
            kind, how = "same", ""
        if not option.ours:
            rows.append((", ".join(f"`{name}`" for name in option.names), kind, how))
    return _table(("option", "state", "how, or why not"), rows)


def _default(option: Option) -> str:
    if option.shown_default is not None:
        return f"`{option.shown_default}`" if "$" in option.shown_default else option.shown_default
    return "" if option.default in (None, "") else f"`{option.value.write(option.default)}`"


def message_fields() -> str:
    """The messages of the request's way, with the fields of their rows."""
    part, entry, batch, done, abandoned = (
        ", ".join(row._fields) for row in (Part, BatchEntry, BatchMessage, Done, AbandonedRequests)
    )
    rows = [
        ("frame", "gateway → scheduler", f"gateway, [part …] with part = ({part})"),
        ("batch", "scheduler → worker", f"{batch} with entry = ({entry})"),
        (
            "answers",
            "worker → gateway",
            "version, [answer …] with answer = (key, outputs, parameters) or (key, code, text), and is_final, moments, "
            "run, number behind it where there are several answers or a trace",
        ),
        ("done", "worker → scheduler", f"worker, [done …] with done = ({done})"),
        ("cancel", "gateway → scheduler", "gateway, keys"),
        ("abandoned", "scheduler → worker", f"scheduler, [({abandoned}) …]"),
        ("release", "gateway → worker", "[(segment, slot, generation) …]"),
        ("drain", "worker → scheduler, and its answer", "asker, model, versions to unload, or that may be unloaded"),
        ("readiness", "gateway, worker → worker", "model, version; answered with whether it is ready"),
        ("repository view", "worker → gateway", "worker, what is wrong with each model by name (empty: nothing)"),
    ]
    return _table(("message", "way", "fields"), rows)


_BOUNDS = [
    ("calls.in_flight", "MAX_IN_FLIGHT", "requests a gateway holds", "503"),
    ("calls.in_flight", "MAX_IN_FLIGHT_BYTES", "their packed bodies", "503"),
    ("gateway.http.protocol", "MAX_HEAD_BYTES", "URL and headers of a request", "400, and the connection ends"),
    (
        "gateway.grpc.stream_methods",
        "MAX_STREAM_REQUESTS",
        "requests without an answer on a gRPC stream",
        "not read on",
    ),
    ("gateway.grpc.stream_methods", "MAX_STREAM_REQUEST_BYTES", "their messages together", "not read on"),
    (
        "gateway.grpc.stream_methods",
        "MAX_STREAM_UNSENT_BYTES",
        "answers a gRPC stream's client has not taken",
        "the stream ends: RESOURCE_EXHAUSTED",
    ),
    ("gateway.grpc.compression", "MAX_EXPANDED_BYTES", "a gRPC message that came compressed", "RESOURCE_EXHAUSTED"),
    ("gateway.http.protocol", "MAX_CHUNKS", "chunks of a request's body", "400, and the connection ends"),
    (
        "gateway.generation",
        "MAX_UNREAD_BYTES",
        "answers of one stream that wait for their reader",
        "the connection ends",
    ),
    (
        "gateway.nats_door.call",
        "MAX_UNREAD_BYTES",
        "answers to one NATS request that wait for acknowledgements",
        "the request ends: 503",
    ),
    ("gateway.nats_door.call", "MAX_ALL_UNREAD_BYTES", "the same of all NATS requests", "the request ends: 503"),
    (
        "gateway.nats_door.call",
        "ACKNOWLEDGEMENT_PATIENCE_S",
        "wait for a NATS caller's next acknowledgement",
        "the request ends: 503",
    ),
    (
        "gateway.nats_door.call",
        "STOPPING_PATIENCE_S",
        "the same while the gateway stops",
        "the request ends: 503",
    ),
    ("calls.answer_order", "MAX_HELD_ANSWERS", "answers that wait for those of earlier requests", "as below"),
    ("calls.answer_order", "MAX_HELD_BYTES", "their outputs", "requests: 503; a stream that waits ends: UNAVAILABLE"),
    ("calls.shared_cache", "PATIENCE_S", "wait for a shared response cache", "the request is queued"),
    ("calls.outbox", "MAX_FRAME_BYTES", "bodies that share a frame", "the next frame takes the rest"),
    ("worker.ensembles.request", "MAX_RUNS", "runs of an ensemble's request whose tensors were lost", "503"),
    ("worker.ensembles.step_gates", "PATIENCE_S", "wait for a step's `max_inflight_requests`", "it goes on"),
    (
        "scheduler.ensemble_batcher",
        "MAX_REQUESTS",
        "requests that go to an ensemble together",
        "the next batch takes the rest",
    ),
    (
        "calls.model_operations",
        "DEPENDENTS_PATIENCE_S",
        "wait for an ensemble's running requests before its models are unloaded with it",
        "they are unloaded",
    ),
    ("calls.payload_store", "FRAME_INLINE_BYTES", "bodies inside a frame, where memory is shared", "by reference"),
    ("calls.outbox", "MAX_FRAMES_ON_THE_WAY", "unacknowledged frames of one model", "later requests wait for one"),
    ("calls.inference", "BROKER_PATIENCE_S", "wait for a broker that is away", "503"),
    ("bus.connection", "MAX_KEPT_BYTES", "messages kept while the broker is away", "dropped: gateways send again"),
    ("bus.streams", "LIVE_MAX_BYTES", "stream LIVE", "publishes are refused: 503"),
    ("bus.streams", "MAX_UNACKED_FRAMES", "frames of one model that a scheduler holds", "the rest stays in the stream"),
    ("bus.model_files", "MODEL_FILES_MAX_BYTES", "files that load requests brought", "503"),
    ("bus.payloads", "INLINE_LIMIT_BYTES", "a tensor inside a message, where memory is shared", "by reference"),
    ("bus.embedded", "MAX_PAYLOAD", "one message through the embedded nats-server", "400"),
    ("scheduler.owned_model", "MAX_HELD_BYTES", "frames of one model in a scheduler", "the rest stays in the stream"),
    ("scheduler.dynamic_batcher", "MAX_BATCH_BYTES", "bodies of one batch", "the next batch takes the rest"),
    ("scheduler.queue_rules", "DEFAULT_MAX_QUEUE_SIZE", "requests that wait for one version, at one level", "503"),
    ("scheduler.sequence_scheduler", "MAX_WAITING", "requests of sequences that wait for one version", "503"),
    ("scheduler.sequences", "MAX_LOST", "lost sequences that are remembered by name", "refused as not started"),
    ("scheduler.event_log", "MAX_LOG_FILE_BYTES", "events in one file of an event log", "the next file is begun"),
    ("scheduler.event_log", "KEPT_LOG_FILES", "files of event logs kept of each model", "the oldest is removed"),
    (
        "scheduler.sequence_progress",
        "MAX_REPLAY_BYTES",
        "bodies of one version kept to be run again since the last checkpoints",
        "a sequence that loses its slot ends",
    ),
    (
        "bus.streams",
        "STATES_MAX_BYTES",
        "checkpoints of the states of sequences",
        "a sequence that loses its slot ends",
    ),
    ("bus.streams", "STATES_TTL_S", "a checkpoint is kept", "a sequence that loses its slot ends"),
    ("bus.sequence_states", "MAX_STATE_BYTES", "state of one sequence that is checkpointed", "it is not"),
    ("bus.sequence_states", "FETCH_TIMEOUT_S", "wait for the checkpoints of a batch", "their sequences end"),
    (
        "worker.batch_execution",
        "MAX_PAUSED",
        "rescheduled requests of an instance whose responses are counted on",
        "the stream of the oldest ends with an error",
    ),
    (
        "worker.statistics",
        "MAX_RESPONSE_INDEXES",
        "responses of a request with counters of their own",
        "counted at the last",
    ),
    (
        "worker.backends.python_calls",
        "MAX_UNSENT_BYTES",
        "responses for a Python model that its process has not taken",
        "the call ends with an error",
    ),
    (
        "worker.python_stub._weir_call_limits",
        "MAX_UNREAD_BYTES",
        "responses of one call that a Python model has not read",
        "the call ends with an error",
    ),
    (
        "worker.python_stub._weir_call_limits",
        "MAX_KEPT_BYTES",
        "responses kept for another iteration",
        "there is none",
    ),
    ("worker.python_stub._weir_call_limits", "MAX_FILES_BYTES", "files of a Python model's load_model", "it raises"),
    ("worker.answer_packer", "MAX_INLINE_ANSWER_BYTES", "outputs of one answer inside a message", "503"),
    ("worker.model_metrics", "MAX_METRICS_BYTES", "metrics that a worker's models make", "making one raises"),
    (
        "worker.backends.python_environment_cache",
        "INSTALL_TIMEOUT_S",
        "installation of a Python model's requirements",
        "the load fails",
    ),
    ("gateway.counter_owners", "MAX_DEPARTED", "workers that have gone, with counters of their own", "summed up"),
    ("gateway.statistics", "MAX_GATEWAYS", "gateways whose hits a gateway believes", "not listened to"),
    ("gateway.statistics", "MAX_SCHEDULERS", "schedulers whose counters a gateway believes", "not listened to"),
    ("gateway.statistics", "ANSWER_TIMEOUT_S", "wait for counters", "the last known ones are told"),
    ("gateway.shared_memory", "MAX_REGIONS", "shared-memory regions registered on a host", "503"),
    ("gateway.http.shared_memory_routes", "MAX_BODY_BYTES", "body that registers a region", "400"),
    ("worker.client_memory", "MAX_REGION_TENSOR_BYTES", "an input in a client's memory", "400"),
    (
        "worker.cuda_regions",
        "MAX_OPEN_ALLOCATIONS",
        "clients' GPU allocations open in a worker",
        "the oldest is closed",
    ),
    (
        "worker.cuda.pinned",
        "DEFAULT_POOL_BYTES",
        "host memory that a worker pins for its GPUs, unless it is told otherwise",
        "ordinary memory",
    ),
    ("worker.cuda.graphs", "MAX_GRAPHS", "CUDA graphs of each of an instance's two sets of buffers", "it runs without"),
    ("calls.model_operations", "MAX_OPERATIONS", "loads and unloads a role waits for", "503"),
    ("calls.model_operations", "OPERATION_TIMEOUT_S", "wait for a load or unload", "503; it goes on"),
    ("schemas.desired", "MAX_FILES", "files of one load request", "400"),
    (
        "worker.model_control",
        "MAX_WAITING_OPERATIONS",
        "operations on one model that wait for each other in a worker",
        "those that a later one supersedes are passed over",
    ),
    (
        "worker.model_placement",
        "ANSWERS_PATIENCE_S",
        "wait for other workers to tell whether they could have a model that is loaded",
        "those that told are reckoned with",
    ),
    ("schemas.placement", "MAX_RESOURCES", "resources that a model or a worker may name", "the load fails"),
    ("schemas.pushed_model", "MAX_PUSHED_FILES", "files of a model that is pushed", "it is not pushed"),
    (
        "bus.pushed_models",
        "PIECE_BYTES",
        "what is held of a file that is pushed or fetched",
        "the next piece takes the rest",
    ),
    ("worker.repository_mirror", "FILES_AT_A_TIME", "files that a worker fetches from NATS side by side", "they wait"),
    ("schemas.registry", "MAX_INSTANCES", "instances of a version on one worker", "the load fails"),
    (
        "worker.one_by_one",
        "MAX_IN_VAIN",
        "batches in a row of which not one request could be run",
        "of the next only a few are tried",
    ),
    (
        "worker.one_by_one",
        "PROBES",
        "requests of such a batch that are run again, as long as none of them can be",
        "the others fail with their batch",
    ),
    (
        "worker.backends.python_keeper",
        "PATIENCE_S",
        "wait of a batch at an instance whose process is away",
        "it goes back to the queue",
    ),
    (
        "worker.backends.python_keeper",
        "SEQUENCE_PATIENCE_S",
        "the same of a model of sequences",
        "its sequences end",
    ),
    (
        "worker.backends.python_keeper",
        "RETIRING_PATIENCE_S",
        "wait for the streams of a process that is replaced",
        "they end with an error",
    ),
    (
        "worker.backends.python_keeper",
        "STOP_TIMEOUT_S",
        "wait for a Python model's `finalize`",
        "its process is killed",
    ),
    (
        "worker.backends.python_limits",
        "START_TIMEOUT_S",
        "wait for a Python model's process to load it, without `stub-timeout-seconds`",
        "the load fails",
    ),
    (
        "worker.backends.python_process",
        "LOAD_STARTS",
        "starts of a process that is killed while it loads",
        "the load fails",
    ),
    ("worker.backends.python", "MAX_STARTED", "sequences an instance remembers to have begun", "the oldest end"),
    ("worker.backends.python_probe", "TIMEOUT_S", "wait for a Python model's `is_ready`", "it is not ready"),
    ("calls.readiness", "ANSWER_TIMEOUT_S", "wait for workers to say whether a model is ready", "it is not ready"),
    ("worker.readiness_answers", "MAX_QUESTIONS", "questions for readiness that wait in a worker", "it is not ready"),
    ("schemas.registry", "MAX_PROBLEM_LENGTH", "characters of why a version can't run", "cut off"),
    ("worker.warmup", "PATIENCE_S", "wait for the last responses to a warm-up sample", "the load fails"),
    (
        "worker.inner_calls",
        "OPEN_PATIENCE_S",
        "wait of the first who asks models from inside of a worker, while the broker is away",
        "UNAVAILABLE; it is tried on",
    ),
    (
        "worker.drains",
        "PATIENCE_S",
        "wait for a scheduler's leave to unload, when none answers",
        "unloaded all the same",
    ),
    ("worker.answer_packer", "READERS_PATIENCE_S", "outputs of an unloaded instance stay readable", "they are gone"),
    ("telemetry.trace_file", "MAX_UNWRITTEN_BYTES", "traces of one setting before they are written", "written at once"),
    ("telemetry.trace", "MAX_MOMENTS", "points on the way of one traced request", "left out"),
    ("bus.settings", "MAX_KEYS", "keys of settings", "dropped and counted"),
    ("bus.settings", "MAX_SETTING_BYTES", "settings under one key", "dropped and counted"),
]
"""(module, constant, what it bounds, what happens beyond it)."""


def bounds() -> str:
    """The limits, with their values."""
    rows = [
        (meaning, _with_unit(name, getattr(import_module(module), name)), beyond, f"`{name}`")
        for module, name, meaning, beyond in _BOUNDS
    ]
    return _table(("what", "limit", "beyond it", "constant"), rows)


def _with_unit(name: str, value: float) -> str:
    if name.endswith("_S"):
        return f"{value:g} s"
    if not name.endswith("BYTES") and name != "MAX_PAYLOAD":
        return f"{value:,}".replace(",", " ")
    return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _rows(rows: Iterable[Row], head: str) -> Callable[[], str]:
    """A table of `rows`, made when the page is."""
    return lambda: _table((head, "state", "how, or why not"), [(f"`{row.name}`", row.state, row.how) for row in rows])


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "serving.md": {"serve options": serve_options},
    "architecture.md": {"messages": message_fields, "bounds": bounds},
    "schedulers.md": {scenario.name: partial(part_of, scenario) for scenario in SCENARIOS},
    "compatibility.md": {
        "endpoints": _rows(ENDPOINTS, "endpoint"),
        "methods": _rows(METHODS, "method"),
        "configuration fields": _rows(config_fields(), "field"),
        "metrics": _rows(METRICS, "metric"),
        "options": options_beside_triton,
    },
}
"""Generated parts by page and marker."""


def with_parts(page: str, text: str) -> str:
    """`text` of `page` with its generated parts as they are now. Raises ValueError when a marker is missing."""
    for marker, make in PARTS[page].items():
        begin, end = f"<!-- generated: {marker} -->", f"<!-- end: {marker} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page} has no part {marker!r}")
        part = f"{begin}\n\n{make()}\n\n{end}"
        text = pattern.sub(lambda _, part=part: part, text)
    return text


def main() -> None:
    """The command; with `--check` it writes nothing, and fails when a page or picture is not as it would be written."""
    stale = []
    wanted = {page: with_parts(page, (DOCS / page).read_text()) for page in PARTS}
    wanted |= {f"pictures/{name}": picture for name, picture in pictures().items()}
    for name, after in wanted.items():
        path = DOCS / name
        if path.exists() and path.read_text() == after:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(after)
    if stale and "--check" in sys.argv:
        sys.exit(f"not as generated, so run make docs: {', '.join(stale)}")


if __name__ == "__main__":
    main()
