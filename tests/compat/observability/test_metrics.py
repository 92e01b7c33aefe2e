"""The metrics page: every family of Triton's, and correct totals over several workers and gateways."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.support.clients.stock import RawConnection, http_inputs
from tests.support.models.ensembles import write_ensemble
from tests.support.models.zoo import Tensors, write_faulty, write_python_model, write_slow
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import Start, role_started
from tests.support.waiting import wait_until

Page = dict[tuple[str, ...], float]
LATENCIES = ("--metrics-config=histogram_latencies=true", "--metrics-config=summary_latencies=true")

MODEL_COUNTERS = ["nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count"]
DURATIONS = [
    f"nv_inference_{name}_duration_us"
    for name in ("request", "queue", "compute_input", "compute_infer", "compute_output")
]
SUMMARIES = [name.replace("_duration_us", "_summary_us") for name in DURATIONS]
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
BUCKETS = """
model_metrics { metric_control [ {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ -1, 0.0, 2.5, 10000 ] }
} ] }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
REPEAT_INPUTS: Tensors = {"IN": ("INT32", [-1]), "DELAY": ("UINT32", [-1]), "WAIT": ("UINT32", [1])}
REPEAT_OUTPUTS: Tensors = {"OUT": ("INT32", [1]), "IDX": ("UINT32", [1])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "models").mkdir()
    write_slow(folder / "models", "slow", 'metric_tags { key: "team" value: "r\\"d" }\n' + BUCKETS)
    write_python_model(folder / "models", "repeat", "repeat", REPEAT_INPUTS, REPEAT_OUTPUTS, 0, DECOUPLED + BUCKETS)
    write_python_model(
        folder / "models",
        "until_cancelled",
        "until_cancelled",
        {"MORE": ("INT32", [1])},
        {"OUT": ("INT32", [1])},
        0,
        DECOUPLED,
    )
    step = "repeat", {name: name for name in REPEAT_INPUTS}, {name: name for name in REPEAT_OUTPUTS}
    write_ensemble(folder / "models", "repeat_ensemble", REPEAT_INPUTS, REPEAT_OUTPUTS, [step])
    write_faulty(folder / "models")
    return folder


@pytest.fixture(scope="module")
def roles(folder: Path) -> Iterator[Start]:
    roles = Start(folder)
    try:
        roles("scheduler")
        roles.worker(*LATENCIES, "--metrics-interval-ms=100")
        yield roles
        roles.end_all()
    finally:
        roles.close()


@pytest.fixture(scope="module")
def gateway(roles: Start) -> Endpoints:
    gateway = roles.gateway(*LATENCIES)
    wait_until(gateway.is_ready)
    return gateway


def text(gateway: Endpoints) -> str:
    with urllib.request.urlopen(f"http://{gateway.metrics_place}/metrics", timeout=10) as page:
        assert page.headers["Content-Type"] == "text/plain; charset=utf-8"
        return str(page.read().decode())


def page(gateway: Endpoints) -> Page:
    """Every sample, by its name and the values of its labels, those in alphabetical order of their names."""
    # The parser knows counters by `_total`, which Triton's lack: it takes them for unknown ones then, and reads them.
    families = text_string_to_metric_families(text(gateway).replace(" counter\n", " unknown\n"))
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def run(gateway: Endpoints, rows: int = 1, delay_ms: float = 1) -> None:
    arrays = {"VALUE": np.ones((rows, 1), np.int64), "DELAY_MS": np.full((rows, 1), delay_ms, np.float32)}
    with gateway.http() as client:
        client.infer("slow", http_inputs(arrays))


def streaming(gateway: Endpoints, model: str, asked: dict[str, list[int]]) -> HTTPResponse:
    """The open answer of `generate_stream`."""
    url = f"http://{gateway.http_place}/v2/models/{model}/generate_stream"
    answer: HTTPResponse = urllib.request.urlopen(url, json.dumps(asked).encode(), timeout=20)
    return answer


def of_slow(reply: Page, name: str) -> float:
    return reply[(name, 'r"d', "slow", "1")]


def test_openmetrics_has_the_same_samples(gateway: Endpoints) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    request = urllib.request.Request(f"http://{gateway.metrics_place}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
        families = list(openmetrics.text_string_to_metric_families(answer.read().decode()))
    names = {sample.name for family in families for sample in family.samples}
    assert names == {key[0] for key in page(gateway)}


def test_families_labels_and_texts(gateway: Endpoints) -> None:
    lines = text(gateway).splitlines()
    kinds = dict(line.split(" ")[2:4] for line in lines if line.startswith("# TYPE"))
    helps = dict(line.split(" ", 3)[2:] for line in lines if line.startswith("# HELP"))
    assert kinds.keys() == helps.keys()
    wanted = {
        **dict.fromkeys([*MODEL_COUNTERS, *DURATIONS, "nv_inference_request_failure"], "counter"),
        **dict.fromkeys(["nv_inference_pending_request_count", "nv_model_load_duration_secs"], "gauge"),
        **dict.fromkeys(SUMMARIES, "summary"),
        FIRST_RESPONSE: "histogram",
        **dict.fromkeys(["nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"], "gauge"),
        **dict.fromkeys([f"nv_gpu_{n}" for n in ("utilization", "memory_total_bytes", "memory_used_bytes")], "gauge"),
        **dict.fromkeys(["nv_gpu_power_usage", "nv_gpu_power_limit"], "gauge"),
        "nv_energy_consumption": "counter",
        **dict.fromkeys([f"nv_pinned_memory_pool_{n}_bytes" for n in ("total", "used")], "gauge"),
    }
    assert {name: kind for name, kind in kinds.items() if name.startswith("nv_")} == wanted
    assert helps["nv_inference_count"] == "Number of inferences performed (does not include cached requests)"
    assert 'nv_inference_request_success{_team="r\\"d",model="slow",version="1"} 0' in lines
    assert 'nv_inference_request_failure{model="faulty",reason="CANCELED",version="1"} 0' in lines


def test_counters_and_what_is_observed_of_latencies(gateway: Endpoints) -> None:
    before = page(gateway)
    run(gateway, 3, 20)
    run(gateway, 2, 20)
    reply = page(gateway)

    def grown(name: str) -> float:
        return of_slow(reply, name) - of_slow(before, name)

    assert [grown(name) for name in MODEL_COUNTERS] == [2, 5, 2]
    assert grown("nv_inference_compute_infer_duration_us") >= 40_000
    assert grown("nv_inference_request_duration_us") >= grown("nv_inference_compute_infer_duration_us")
    assert of_slow(reply, "nv_model_load_duration_secs") > 0
    for summary, duration in zip(SUMMARIES, DURATIONS, strict=True):
        assert grown(f"{summary}_count") == 2
        assert abs(grown(f"{summary}_sum") - grown(duration)) <= 2 + 2
    quantiles = [reply["nv_inference_compute_infer_summary_us", 'r"d', "slow", q, "1"] for q in ("0.5", "0.9", "0.999")]
    assert 19_000 < quantiles[0] <= quantiles[1] <= quantiles[2]


def test_first_responses_of_decoupled_models_are_observed(gateway: Endpoints) -> None:
    before = page(gateway)

    def grown(name: str, *labels: str) -> float:
        key = (f"{FIRST_RESPONSE}_{name}", *labels, "1")
        return page(gateway)[key] - before[key]

    for model in ("repeat", "repeat_ensemble"):
        with streaming(gateway, model, {"IN": [1, 2], "DELAY": [20, 1], "WAIT": [0]}) as answer:
            assert answer.read().count(b"data: ") == 2
    assert [grown("count", "repeat"), grown("count", "repeat_ensemble")] == [2, 1]
    assert [grown("bucket", le, "repeat") for le in ("-1", "0", "2.5", "10000", "+Inf")] == [0, 0, 0, 2, 2]
    bounds = {key[1] for key in before if key[0] == f"{FIRST_RESPONSE}_bucket" and key[2] == "repeat_ensemble"}
    assert bounds == {"100", "500", "2000", "5000", "+Inf"}
    for model, requests in (("repeat", 2), ("repeat_ensemble", 1)):
        assert grown("sum", model) >= 20 * requests
        assert f'_sum{{model="{model}",version="1"}} {int(grown("sum", model))}\n' in text(gateway)
        assert page(gateway)["nv_inference_request_summary_us_count", model, "1"] == requests
    assert not [key for key in before if key[0].startswith(FIRST_RESPONSE) and "slow" in key]


def test_a_first_response_is_observed_before_the_last(gateway: Endpoints) -> None:
    count = f"{FIRST_RESPONSE}_count", "until_cancelled", "1"
    with streaming(gateway, "until_cancelled", {"MORE": [0]}) as answer:
        assert answer.readline().startswith(b"data: ")
        assert page(gateway)[count] == 1
        assert page(gateway)["nv_inference_request_success", "until_cancelled", "1"] == 0
    wait_until(lambda: page(gateway)["nv_inference_request_failure", "until_cancelled", "CANCELED", "1"] == 1)
    assert page(gateway)[count] == 1


def test_a_running_request_is_not_pending_and_one_behind_it_is(gateway: Endpoints) -> None:
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(run, gateway, 1, 700) for _ in range(2)]
        wait_until(lambda: of_slow(page(gateway), "nv_inference_pending_request_count") == 1)
        assert page(gateway)["weir_gateway_in_flight",] == 2
        for each in asked:
            each.result()
    reply = page(gateway)
    assert of_slow(reply, "nv_inference_pending_request_count") == reply["weir_gateway_in_flight",] == 0


def test_devices(gateway: Endpoints) -> None:
    reply = wait_until(lambda: "nv_cpu_memory_total_bytes" in text(gateway) and page(gateway))
    assert 0 <= reply["nv_cpu_utilization",] <= 1
    assert 0 < reply["nv_cpu_memory_used_bytes",] < reply["nv_cpu_memory_total_bytes",]


def test_own_metrics(gateway: Endpoints) -> None:
    before = page(gateway)
    run(gateway, 4, 30)
    reply = page(gateway)

    def grown(*key: str) -> float:
        return reply[key] - before[key]

    assert grown("weir_gateway_requests") == grown("weir_gateway_frame_requests_count") == 1
    assert grown("weir_gateway_frame_bytes_sum") > 0
    assert grown("weir_batch_requests_sum", "slow") == 1
    assert grown("weir_batch_rows_sum", "slow", "1") == 4
    in_flight_us = grown("weir_gateway_in_flight_duration_us")
    hops = [grown("weir_hop_duration_us", hop, "slow", "1") for hop in ("queue", "staged", "compute")]
    assert 30_000 <= hops[2] <= sum(hops) < in_flight_us < 10_000_000
    assert reply["weir_queue_depth", "live", "slow"] == reply["weir_queue_oldest_age_us", "live", "slow"] == 0
    for name in ("weir_redelivered_frames", "weir_retried_batches"):
        assert reply[name, "slow"] == 0
    assert [reply["weir_malformed_messages", role] for role in ("gateway", "scheduler", "worker")] == [0, 0, 0]


def test_connections_to_all_ports_count(gateway: Endpoints) -> None:
    def open_now() -> float:
        return gateway.metrics()["weir_gateway_connections", ""]

    places = (gateway.http_place, gateway.grpc_place, gateway.metrics_place)
    opened = [RawConnection(int(place.rpartition(":")[2])) for place in places for _ in range(20)]
    wait_until(lambda: open_now() > len(opened))  # the one for the metrics counts as well
    assert gateway.metrics()["weir_gateway_connections_limit", ""] > len(opened)
    for connection in opened:
        connection.close()
    wait_until(lambda: open_now() < len(opened) / 3)


def test_without_counter_latencies_the_counters_stand_still(roles: Start) -> None:
    plain = roles.gateway("--metrics-config=counter_latencies=false")
    wait_until(plain.is_ready)
    run(plain)
    reply = page(plain)
    assert [of_slow(reply, name) for name in MODEL_COUNTERS] == [0, 0, 0]
    assert not {name for name, *_ in reply} & {*DURATIONS, *SUMMARIES, FIRST_RESPONSE}
    with plain.http() as client:
        (row,) = client.get_inference_statistics("slow")["model_stats"]
    assert row["inference_count"] > 0


def test_metrics_may_be_off_and_a_setting_may_be_none(roles: Start, tmp_path: Path) -> None:
    ports = ("--http-port=0", "--grpc-port=0")
    assert "metrics_port" not in roles("gateway", *ports, "--metrics-port=0", "--allow-metrics=false").facts
    for role, options in (("gateway", ports), ("worker", (f"--model-repository={tmp_path}",))):
        words = [role, f"--nats={roles.nats.url}", *options, "--metrics-config=nonsense"]
        process, facts = role_started(words, tmp_path, tmp_path / f"{role}.log")
        assert facts == {"error": "--metrics-config option format is <setting>=<value>. Got nonsense"}
        assert process.wait(30) != 0


@pytest.mark.timeout(120)
def test_totals_over_two_workers_at_two_gateways(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(folder / "models")
    roles = Start(tmp_path)
    try:
        roles("scheduler")
        workers = [roles.worker(*LATENCIES) for _ in range(2)]
        gateways = [roles.gateway(*LATENCIES) for _ in range(2)]
        for gateway in gateways:
            wait_until(gateway.is_ready)
        sent = 0

        def check() -> None:
            for asked in gateways:
                reply = page(asked)
                assert [of_slow(reply, name) for name in MODEL_COUNTERS] == [sent, 2 * sent, sent]
                assert of_slow(reply, "nv_inference_queue_summary_us_count") == sent
                with asked.grpc() as client:
                    (row,) = client.get_inference_statistics("slow").model_stats
                assert (row.inference_stats.success.count, row.inference_count) == (sent, 2 * sent)

        for turn in range(3):
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda number: run(gateways[number % 2], 2, 5), range(4)))
            sent += 4
            # At once, and at the gateway that has not answered last.
            assert of_slow(page(gateways[turn % 2]), "nv_inference_request_success") == sent
            check()
        # A worker that leaves has told its counters to both, without being asked.
        run(gateways[0], 2, 1)
        sent += 1
        assert workers[0].end() == 0
        check()
        # One that is killed has told them when it was last asked.
        roles.worker(*LATENCIES)
        check()
        workers[1].end(signal.SIGKILL)
        run(gateways[1], 2, 1)
        sent += 1
        check()
        roles.end_all()
    finally:
        roles.close()
