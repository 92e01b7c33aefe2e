"""`SequenceLedger`: clients that run one sequence after another on each partition of a model, and the results."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import http_inputs
from tests.support.servers.endpoints import Endpoints
from tests.support.waiting import running, wait_until
from weir.schemas.config.parameters import partition_of

LENGTH = 8

_PAUSE_S = 0.01


class Ended(NamedTuple):
    """A sequence: its partition, how many of its requests were answered, and the error it ended with, if any."""

    partition: int
    answered: int
    error: str


class SequenceLedger:
    """A thread for each partition of `model`, an accumulator, while its context is entered.

    Each sum must be that of its own sequence: one that a request was added to twice, or not at all, shows.
    """

    def __init__(self, served: Endpoints, model: str, partitions: int) -> None:
        self._served = served
        self._model = model
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(partition,), daemon=True) for partition in range(partitions)
        ]
        self._sent = [0] * partitions  # each is written by one thread alone
        self._told = [0] * partitions
        self._latest_s = [0.0] * partitions  # when what was answered rightly had been sent
        self.ended: list[Ended] = []
        self.wrong: list[str] = []

    @contextmanager
    def sending(self) -> Iterator[SequenceLedger]:
        """Sends as long as the context lasts; then sequences that have begun come to their end."""
        with running(self._threads, self._is_over):
            yield self

    @property
    def sent(self) -> int:
        """Requests."""
        return sum(self._sent)

    @property
    def lost(self) -> int:
        """Requests without an end."""
        return self.sent - sum(self._told)

    def wait_for_all(self, moment_s: float, timeout_s: float = 40.0) -> float:
        """Seconds from this moment until every partition has answered a request that was sent after it."""
        wait_until(lambda: min(self._latest_s) > moment_s, timeout_s)
        return time.monotonic() - moment_s

    def _send(self, partition: int) -> None:
        count = len(self._sent)
        ids = (id for id in itertools.count(1) if partition_of(id, count) == partition)
        with self._served.http(timeout_s=60) as client:
            while not self._is_over.is_set():
                self.ended.append(self._sequence(client, partition, next(ids)))

    def _sequence(self, client: InferenceServerClient, partition: int, id: int) -> Ended:
        total = 0.0
        for step in range(LENGTH):
            value = float(id % 97 + step)
            total += value
            flags = {"sequence_start": step == 0, "sequence_end": step == LENGTH - 1}
            inputs = http_inputs({"IN": np.array([[value]], np.float32)})
            sent_s = time.monotonic()
            self._sent[partition] += 1
            try:
                answer = client.infer(self._model, inputs, sequence_id=id, **flags).as_numpy("OUT").item()
            except InferenceServerException as refusal:
                self._told[partition] += 1
                return Ended(partition, step, refusal.message())
            self._told[partition] += 1
            if answer != total:
                self.wrong.append(f"sequence {id}, request {step}: {answer} instead of {total}")
            self._latest_s[partition] = sent_s
            time.sleep(_PAUSE_S)
        return Ended(partition, LENGTH, "")
