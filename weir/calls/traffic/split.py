"""`TrafficSplit`: chooses the version of each request that names none, by the weights of a `TrafficRule`.

A request with a sticky value (of the rule's header or parameter, or the id of a sequence) gets the version that wins a
weighted rendezvous: each version draws a number from the hash of model, version and value, and its weight scales the
draw. So a value stays on its version while shares change, except where it must move: a version whose share grows takes
values from the others, and loses none. A version that is not ready gives its values to the others, and gets the same ones
back. The share of a version among many values differs from its weight by chance (by 0.16 % of 100 000 values at most, one
standard deviation).

A request without a sticky value takes the next point of a golden-ratio sequence on [0, 1), cut by the weights. Of any run
of requests of one caller each version gets its share, within a few requests.

Sans-IO. Source: Thaler and Ravishankar, rendezvous hashing (1998), with the logarithmic weights of Schindelhauer and
Schomaker (2005); Kronecker sequences.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

from weir.schemas.config.traffic import TrafficRule
from weir.schemas.core.errors import Reason, unavailable
from weir.schemas.core.requests import SEQUENCE_START, InferRequest, Lane
from weir.schemas.wire.traffic import ShadowRule

if TYPE_CHECKING:
    from weir.calls.traffic.counters import TrafficCounters

NAMED, SPLIT, STICKY, SHADOW = "named", "split", "sticky", "shadow"
"""How a request got its version: its caller named it, by weight, by weight and its sticky value, as a copy."""

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_HASHES = float(1 << 64)


class TrafficSplit:
    """The split of `model` by `rule` while these versions are `ready`.

    `counters` count what becomes of the model's requests. With `keeps_state`, the requests of a sequence after its first
    one get no version here: the scheduler runs them on the version that has the sequence. `start` (from 0 to 1) is the
    first point for requests without a sticky value. `shadow` asks for copies of requests on another version.
    """

    def __init__(  # noqa: PLR0913 - the parts of a split, each of which changes by itself
        self,
        model: str,
        rule: TrafficRule,
        ready: Collection[int],
        counters: TrafficCounters,
        keeps_state: bool = False,
        start: float | None = None,
        shadow: ShadowRule | None = None,
    ) -> None:
        self._shadow = shadow if shadow is not None and shadow.version in ready else None
        self._shadow_point = 0.0
        self.compares = self._shadow is not None and self._shadow.compares
        self.model = model
        self.rule = rule
        self.counters = counters
        self.arms = {version: weight for version, weight in rule.weights.items() if weight and version in ready}
        self._keeps_state = keeps_state
        self._salts = [(f"{model}\0{version}\0".encode(), version, weight) for version, weight in self.arms.items()]
        total, bound, bounds = sum(self.arms.values()), 0.0, []
        for version, weight in self.arms.items():
            bound += weight / total
            bounds.append((bound, version))
        self._bounds = bounds
        self._point = random.random() if start is None else start  # noqa: S311 - not a secret

    @property
    def unready(self) -> list[int]:
        """The versions that have a weight and are not ready: the others get their share."""
        return [version for version, weight in self.rule.weights.items() if weight and version not in self.arms]

    @property
    def shares(self) -> Mapping[int, float]:
        """The share that each version gets now, of 1."""
        total = sum(self.arms.values())
        return {version: self.arms.get(version, 0.0) / total if total else 0.0 for version in self.rule.weights}

    def route(self, request: InferRequest, key: str = "") -> str:
        """Sets the version of `request` unless its caller has named one; returns how the version was chosen.

        `key` is the value of the rule's header, "" without one. Raises WeirError (UNAVAILABLE) while no version with a
        weight is ready.
        """
        if request.model_version:
            return NAMED
        sequence = request.correlation_id
        if sequence and self._keeps_state and not request.sequence_flags & SEQUENCE_START:
            return STICKY
        if not self.arms:
            listed = ", ".join(str(version) for version in self.unready)
            raise unavailable(
                f"Request for unknown model: '{self.model}' is split between versions of which none is at ready state: "
                f"{listed}",
                Reason.NOT_READY,
            )
        if sequence:
            key = f"\0{sequence}"
        elif not key and self.rule.parameter and request.parameters:
            key = str(request.parameters.get(self.rule.parameter, ""))
        request.model_version = str(self.version_of(key) if key else self.next_version())
        return STICKY if key else SPLIT

    def shadow_of(self, request: InferRequest) -> int:
        """The version that is to run a copy of a request that has its version; 0 where no copy is wanted.

        Copies are made of live requests without state and without content in a client's memory, which may change.
        """
        shadow = self._shadow
        if shadow is None or request.correlation_id or request.regions or request.lane is not Lane.LIVE:
            return 0
        if request.model_version == str(shadow.version):
            return 0
        point = self._shadow_point = (self._shadow_point + _GOLDEN_RATIO) % 1.0
        return shadow.version if point < shadow.share else 0

    def version_of(self, key: str) -> int:
        """The version for a sticky value. There must be a version that is ready."""
        if len(self._salts) == 1:
            return self._salts[0][1]
        value = key.encode(errors="surrogatepass")
        best, chosen = math.inf, 0
        for salt, version, weight in self._salts:
            drawn = (int.from_bytes(blake2b(salt + value, digest_size=8).digest(), "big") + 0.5) / _HASHES
            score = -math.log(drawn) / weight
            if score < best:
                best, chosen = score, version
        return chosen

    def next_version(self) -> int:
        """The version for the next request without a sticky value. There must be a version that is ready."""
        point = self._point = (self._point + _GOLDEN_RATIO) % 1.0
        for bound, version in self._bounds:
            if point < bound:
                return version
        return self._bounds[-1][1]
