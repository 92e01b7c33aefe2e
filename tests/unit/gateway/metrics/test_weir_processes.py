"""The metrics of processes: each process appears once."""

from weir.gateway.metrics.weir import process_families
from weir.schemas.wire.statistics import ProcessReading


def test_each_process_has_its_role_name_and_host() -> None:
    readings = [
        ("worker", "worker-0000000a-1", ProcessReading(cpu_s=2.5, resident_bytes=3000)),
        ("gateway", "gateway-0000000b-2", ProcessReading(cpu_s=1.0, resident_bytes=2000)),
    ]
    cpu, memory = process_families(readings)
    gateway = {"role": "gateway", "process": "gateway-0000000b-2", "host": "0000000b"}
    worker = {"role": "worker", "process": "worker-0000000a-1", "host": "0000000a"}
    assert (cpu.name, cpu.kind) == ("weir_process_cpu_seconds", "counter")
    assert [(sample.labels, sample.value) for sample in cpu.samples] == [(gateway, 1.0), (worker, 2.5)]
    assert [(sample.labels, sample.value) for sample in memory.samples] == [(gateway, 2000), (worker, 3000)]
