"""`LoadTest`: a sweep over levels of load on one model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from weir.perf.clients.administration import Administration
from weir.perf.clients.session import Client
from weir.perf.load.arrivals import ArrivalProcess, Arrivals
from weir.perf.load.levels import Level, Mode
from weir.perf.load.sequences import SequenceSource
from weir.perf.measurement.level import LevelResult, OnWindow, Timing, measure_level
from weir.perf.measurement.loops import ClosedLoop, LoadLoop, OpenLoop
from weir.perf.measurement.server_statistics import ServerCounters

DEFAULT_SEQUENCE_LENGTH = 20
"""The length of sequences where none is given, as in perf_analyzer."""

DEFAULT_MAX_IN_FLIGHT = 1000

_MAX_FIRST_ID = 1 << 30  # ids must fit the smallest type of a correlation id, INT32


@dataclass
class LoadTest:
    """What is sent to `model`, and how it is measured.

    `samples` is the number of samples that the client has loaded. `sequence_length` 0: the model has no sequences.
    `streams`: responses come on a stream, and their times count. `max_in_flight` is that of open loops. `results` are
    those of the levels that were measured so far.
    """

    model: str
    version: str
    levels: Sequence[Level]
    samples: int
    timing: Timing
    arrivals: ArrivalProcess = ArrivalProcess.POISSON
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    sequence_length: int = 0
    has_text_ids: bool = False
    streams: bool = False
    seed: int = 1
    results: list[LevelResult] = field(default_factory=list)

    async def run(
        self, client: Client, administration: Administration, stop: asyncio.Event, on_window: OnWindow
    ) -> None:
        """Measures the levels in turn, until `stop` is set or a level has no answer at all."""

        async def read_counters() -> ServerCounters:
            return ServerCounters.read(await administration.statistics(self.model, self.version))

        sequences = self._sequences()
        for level in self.levels:
            loop = self._loop(level, client, sequences)
            result = await measure_level(level, loop, self.timing, read_counters, stop, on_window)
            if result.windows:
                self.results.append(result)
            if stop.is_set() or not result.has_answers:
                break

    def _sequences(self) -> SequenceSource | None:
        if not self.sequence_length:
            return None
        # Sequences of an earlier test may still be open on the server.
        first_id = random.SystemRandom().randrange(1, _MAX_FIRST_ID)
        return SequenceSource(self.sequence_length, first_id, self.has_text_ids)

    def _loop(self, level: Level, client: Client, sequences: SequenceSource | None) -> LoadLoop:
        if level.mode is Mode.CONCURRENCY:
            return ClosedLoop(client, self.samples, sequences, self.streams, int(level.value))
        arrivals = Arrivals(level.value, self.arrivals, self.seed)
        return OpenLoop(client, self.samples, sequences, self.streams, arrivals, self.max_in_flight)
