"""A source for `weir top` with given numbers."""

from __future__ import annotations

from typing import Any

from weir.cluster.rates import Key, Rates
from weir.cluster.status.findings import findings_of
from weir.cluster.status.snapshot import (
    ClusterStatus,
    Lane,
    ModelStatus,
    Problem,
    QueueStatus,
    RoleStatus,
    VersionStatus,
)
from weir.console.history.series import Values

NAMES = ("recognise_text", "silero_vad", "magika", "mlp", "file_features", "rarely_used")


class GivenSource:
    """Six models, of which one is slow and one fails; the test changes `load` and `state`."""

    place = "127.0.0.1:4222"

    def __init__(self) -> None:
        self.load: dict[str, Values] = {
            name: {
                "requests_per_s": float(400 // (number + 1)),
                "failures_per_s": 2.5 if name == "magika" else 0.0,
                "p50_ms": 0.8 * (number + 1),
                "p99_ms": 3.1 * (number + 1) ** 2,
                "queue_depth": 40.0 if name == "recognise_text" else 0.0,
                "queue_oldest_s": 0.12 if name == "recognise_text" else 0.0,
                "batch_size": 7.4 / (number + 1),
                "utilization": 0.95 / (number + 1),
            }
            for number, name in enumerate(NAMES[:-1])
        }
        self.state: ClusterStatus | None = _status()

    def models(self) -> dict[str, Values]:
        return self.load

    def cluster(self) -> Values:
        rates = sum(values["requests_per_s"] or 0 for values in self.load.values())
        return {"requests_per_s": rates, "failures_per_s": 2.5, "p50_ms": 1.2, "p99_ms": 41.0, "queue_depth": 40.0,
                "utilization": 0.61, "cpu_utilization": 0.72}  # fmt: skip

    def versions(self) -> dict[Key, Rates]:
        return {
            ("recognise_text", 1): Rates(300, 0, 0.7, 2.9, 7.9),
            ("recognise_text", 2): Rates(100, 0, 1.1, 4.0, 6.0),
        }

    def status(self) -> ClusterStatus | None:
        return self.state

    def history(self, model: str, since_ms: int) -> dict[str, list[Any]]:
        points = range(120)
        return {
            "at_ms": [since_ms + point * 1000 for point in points],
            "requests_per_s": [200.0 + point % 40 * 5 for point in points],
            "p99_ms": [3.0 + point % 7 for point in points],
            "queue_depth": [float(point % 13 * 3) for point in points],
        }


def _status() -> ClusterStatus:
    models = [
        ModelStatus(
            name=name, namespace="",
            versions=[
                VersionStatus(version=number, state="READY", workers=2, instances=2, busy=1, reasons=[], share=share)
                for number, share in (((1, 0.75), (2, 0.25)) if name == "recognise_text" else ((1, None),))
            ],
            workers=["worker-1f2e-10", "worker-1f2e-11"], reasons=[], scaled_to_zero=name == "rarely_used",
            utilization=0.5, desired_workers=2,
        )
        for name in NAMES
    ]  # fmt: skip
    queue = QueueStatus(
        model="recognise_text", namespace="", partition=0, owner="scheduler-1f2e-7", epoch=1, claims=["scheduler-1f2e-7"],
        frames=44, lanes={"live": Lane(depth=40, oldest_s=0.12), "event": Lane(depth=0, oldest_s=0)},
    )  # fmt: skip
    roles = [
        RoleStatus(
            role=role, id=f"{role}-1f2e-{number}", host="1f2e", host_name="h", pid=number, release="", since_ms=0,
            state="up", urls=[], queues=0, models=0, instances=0, batches=0, busy=0, utilization=None,
        )
        for role, number in (("gateway", 1), ("gateway", 2), ("scheduler", 7), ("worker", 10), ("worker", 11))
    ]  # fmt: skip
    text = "the oldest of 40 waiting live requests of 'recognise_text' has waited for 12 s"
    problem = Problem(level="warning", kind="queue waits", about="recognise_text", text=text)
    return ClusterStatus(
        taken_ms=1, state="degraded", problems=[problem], findings=findings_of([problem]), roles=roles, models=models,
        queues=[queue],
    )  # fmt: skip
