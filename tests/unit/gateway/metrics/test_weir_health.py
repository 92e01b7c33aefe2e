"""The health metrics of processes."""

from weir.gateway.metrics.weir import health_families
from weir.runtime.containment import report
from weir.runtime.loop_lag import process_health
from weir.schemas.wire.statistics import HealthCounters


def test_each_process_has_its_lag_and_its_contained_failures() -> None:
    readings = [
        ("worker", "worker-0000000a-1", HealthCounters(loop_lag_s=0.25)),
        ("gateway", "gateway-0000000b-2", HealthCounters(loop_lag_s=0.5, contained_failures={"calls.x:f": 3})),
    ]
    lag, failures = health_families(readings)
    gateway = {"role": "gateway", "process": "gateway-0000000b-2", "host": "0000000b"}
    worker = {"role": "worker", "process": "worker-0000000a-1", "host": "0000000a"}
    assert (lag.name, lag.kind) == ("weir_loop_lag_seconds", "gauge")
    assert [(sample.labels, sample.value) for sample in lag.samples] == [(gateway, 0.5), (worker, 0.25)]
    assert (failures.name, failures.kind) == ("weir_contained_failures_total", "counter")
    assert [(sample.labels, sample.value) for sample in failures.samples] == [({**gateway, "site": "calls.x:f"}, 3)]


def test_a_process_reports_what_it_has_contained() -> None:
    report("tests: health", ValueError("unexpected"))
    health = HealthCounters(**process_health())
    assert health.contained_failures["tests: health"] >= 1
    assert health.loop_lag_s == 0
