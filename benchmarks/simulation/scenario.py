"""`Scenario`: the options of a simulation. Each field is a command line option of the same name."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from weir.schemas.config.model_config import ModelConfig

DYNAMIC, DEFAULT, DIRECT, OLDEST = "dynamic", "default", "direct", "oldest"
SEQUENCES = (DIRECT, OLDEST)


def _told(help: str, default: Any, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The options of a simulation, in Triton's names; times without a unit in their name are in microseconds."""

    policy: str = _told("the scheduler of each model", DYNAMIC, (DYNAMIC, DEFAULT, *SEQUENCES))
    requests: int = _told("how many come", 100_000)
    seed: int = _told("the same seed, the same outcome", 0)
    models: int = _told("how many there are", 1)
    zipf: float = _told("exponent of the models' popularity; 0: all alike", 1.0)
    workers: int = _told("how many there are; each holds every model", 1)
    instances: int = _told("of each model on each worker", 1)
    shared_devices: int = _told("devices of a worker that its instances share; 0: each instance has its own", 0)
    # What comes
    arrivals: str = _told("", "poisson", ("poisson", "constant", "bursty"))
    load: float = _told("rate as a share of what the instances of the most popular model could carry", 0.7)
    rate: float = _told("requests a second, of all models; 0: as --load has it", 0.0)
    burst_on_s: float = _told("mean length of a burst, of bursty arrivals", 0.05)
    burst_off_s: float = _told("mean length of the silence after it", 0.05)
    trace: str = _told("take arrivals from this file of microseconds, one a line", "")
    rows: str = _told("batch sizes of requests, with their shares", "1")
    priorities: str = _told("priorities of requests, with their shares: 1=0.2,2=0.8", "0")
    timeouts: str = _told("timeouts of requests, with their shares", "0")
    deadlines: str = _told("deadlines of requests, from their arrival, with their shares", "0")
    sequence_length: int = _told("requests of a sequence", 20)
    sequence_interval: int = _told("time from one request of a sequence to its next", 20_000)
    job_window: int = _told("offline requests of a job kept waiting or running beside all this; 0: no job", 0)
    job_lane: int = _told("by which they come: 2 as a job, 1 as events", 2, (1, 2))
    # What it takes
    service: str = _told("distribution of execution times", "exponential", ("exponential", "constant", "lognormal"))
    service_us: float = _told("mean execution time of a batch", 1000.0)
    service_row_us: float = _told("and for each of its rows", 50.0)
    service_sigma: float = _told("sigma of lognormal execution times", 0.5)
    hop_us: int = _told("time of a message from scheduler to worker, or back", 0)
    lose_worker_every_s: float = _told("a worker dies, in turn, so often; 0: never", 0.0)
    worker_back_after_s: float = _told("and is back after this time", 1.0)
    # Configuration
    max_batch_size: int = _told("", 32)
    preferred_batch_size: str = _told("separated by +: 4+8", "")
    max_queue_delay_microseconds: int = _told("", 0)
    preserve_ordering: bool = _told("", False)
    priority_levels: int = _told("", 0)
    default_priority_level: int = _told("0: the lowest", 0)
    max_queue_size: int = _told("0: the default of Weir", 0)
    default_timeout_microseconds: int = _told("", 0)
    timeout_action: str = _told("", "REJECT", ("REJECT", "DELAY"))
    allow_timeout_override: bool = _told("", False)
    max_candidate_sequences: int = _told("of oldest", 0)
    minimum_slot_utilization: float = _told("of direct", 0.0)
    max_sequence_idle_microseconds: int = _told("", 5_000_000)

    def config(self, name: str) -> ModelConfig:
        """The configuration of model `name`."""
        preferred = [int(size) for size in self.preferred_batch_size.split("+") if size]
        delay = {"max_queue_delay_microseconds": self.max_queue_delay_microseconds}
        described: dict[str, Any] = {"name": name, "max_batch_size": self.max_batch_size}
        if self.policy in SEQUENCES:
            strategy: dict[str, Any] = {**delay}
            if self.policy == DIRECT:
                strategy["minimum_slot_utilization"] = self.minimum_slot_utilization
            else:
                strategy["max_candidate_sequences"] = self.max_candidate_sequences
                strategy["preferred_batch_size"] = preferred
            idle = self.max_sequence_idle_microseconds
            described["sequence_batching"] = {self.policy: strategy, "max_sequence_idle_microseconds": idle}
        elif self.policy != DEFAULT:
            described["dynamic_batching"] = {
                **delay,
                "preferred_batch_size": preferred,
                "preserve_ordering": self.preserve_ordering,
                "priority_levels": self.priority_levels,
                "default_priority_level": self.default_priority_level or self.priority_levels,
                "default_queue_policy": {
                    "max_queue_size": self.max_queue_size,
                    "default_timeout_microseconds": self.default_timeout_microseconds,
                    "timeout_action": self.timeout_action,
                    "allow_timeout_override": self.allow_timeout_override,
                },
            }
        return ModelConfig.model_validate(described)

    def shares(self) -> list[float]:
        """The share of each model in what comes, most popular first."""
        weights = [1.0 / rank**self.zipf for rank in range(1, self.models + 1)]
        return [weight / sum(weights) for weight in weights]

    def requests_per_s(self) -> float:
        """How many come: `rate`, or what `load` asks for."""
        if self.rate:
            return self.rate
        rows = mix(self.rows)
        mean_rows = sum(int(size) * share for size, share in rows)
        batch_rows = mean_rows if self.policy == DEFAULT else max(self.max_batch_size, 1)
        per_request_us = (self.service_us + self.service_row_us * batch_rows) / batch_rows * mean_rows
        if self.shared_devices:
            return (
                self.load * self.workers * min(self.shared_devices, self.instances * self.models) * 1e6 / per_request_us
            )
        return self.load * self.workers * self.instances * 1e6 / per_request_us / max(self.shares())

    def changed(self, name: str, text: str) -> Scenario:
        """With another value of a field. Raises ValueError for one that can't be, or an unknown field."""
        known = {one.name: one for one in fields(self)}
        name = name.replace("-", "_")
        if name not in known:
            raise ValueError(f"nothing is called {name}")
        choices = known[name].metadata["choices"]
        if choices and text not in choices:
            raise ValueError(f"{name} is one of {', '.join(choices)}")
        return replace(self, **{name: _reader(known[name].default)(text)})


def mix(text: str) -> list[tuple[str, float]]:
    """(value, share) of each part of a mix such as `1=0.9,4=0.1`; a lone value has the whole."""
    parts = [part.partition("=") for part in text.split(",")]
    weights = [(value, float(weight or 1)) for value, _, weight in parts]
    total = sum(weight for _, weight in weights)
    return [(value, weight / total) for value, weight in weights]


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for each field."""
    for one in fields(Scenario):
        assert one.default is not MISSING
        name, reply = f"--{one.name.replace('_', '-')}", one.metadata
        if isinstance(one.default, bool):
            parser.add_argument(name, action="store_true", help=reply["help"])
        else:
            help = f"{reply['help']} (default: {one.default or 'none'})".strip()
            reader = _reader(one.default)
            parser.add_argument(name, type=reader, default=one.default, choices=reply["choices"] or None, help=help)


def _reader(default: Any) -> Any:
    if isinstance(default, bool):
        return lambda text: text.lower() in ("1", "true", "yes")
    # 1e6 is a number of requests too.
    return (lambda text: int(float(text))) if isinstance(default, int) else type(default)
