"""The load metrics of a model whose queues several schedulers own."""

from weir.gateway.metrics.weir import load_families
from weir.schemas.wire.statistics import HistogramCounters, LoadCounters, QueueCounters


def queue(model: str, **load: object) -> QueueCounters:
    told = LoadCounters(**load) if load else None
    return QueueCounters(model=model, lanes={}, versions=[], batch_requests=HistogramCounters(), load=told)


def test_queues_of_a_model_are_added_up() -> None:
    queues = [
        queue("m", instances=3, utilization=0.5, desired_workers=0.75, expected_wait_us=5, refused={"wait": 2}),
        queue(
            "m", instances=1, utilization=0.1, desired_workers=0.5, expected_wait_us=7, refused={"wait": 1, "queue": 4}
        ),
        queue("n", instances=4, utilization=1.0, desired_workers=4.0),
        queue("n"),
        queue("of nobody", instances=9, utilization=1.0, desired_workers=9.0),
    ]
    labels = {name: {"model": name} for name in ("m", "n", "away")}
    told = {
        (family.name, *sample.labels.values()): sample.value
        for family in load_families(queues, labels, {"m": 2, "n": 4}, {"n"})
        for sample in family.samples
    }
    assert told == {
        ("weir_queue_expected_wait_us", "m"): 7,
        ("weir_queue_expected_wait_us", "n"): 0,
        ("weir_workers", "away"): 0,
        ("weir_workers", "m"): 2,
        ("weir_workers", "n"): 4,
        ("weir_model_on_gpu", "away"): 0,
        ("weir_model_on_gpu", "m"): 0,
        ("weir_model_on_gpu", "n"): 1,
        ("weir_instances", "m"): 4,
        ("weir_instances", "n"): 4,
        ("weir_worker_utilization", "m"): 0.4,
        ("weir_worker_utilization", "n"): 1.0,
        ("weir_cluster_utilization",): 0.7,
        ("weir_desired_workers", "m"): 2,
        ("weir_desired_workers", "n"): 4,
        ("weir_refused_requests", "m", "queue"): 4,
        ("weir_refused_requests", "m", "wait"): 3,
        ("weir_refused_requests", "n", "queue"): 0,
        ("weir_refused_requests", "n", "wait"): 0,
    }


def test_parts_that_are_one_by_rounding_are_one() -> None:
    queues = [queue("m", desired_workers=1 / 3) for _ in range(3)]
    families = {family.name: family for family in load_families(queues, {"m": {"model": "m"}}, {})}
    assert [sample.value for sample in families["weir_desired_workers"].samples] == [1]
