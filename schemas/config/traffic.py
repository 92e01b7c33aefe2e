"""`TrafficRule`: how the requests of a model that name no version are split among its versions.

A rule comes from an operator (`PUT /v2/models/{model}/traffic`), or from two parameters of the model's configuration:

- `weir_traffic`: the weights by version, as `1=90 2=10`;
- `weir_traffic_sticky`: `header:NAME` or `parameter:NAME`. Requests with the same value there get the same version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from weir.schemas.config.parameters import ParameterError

if TYPE_CHECKING:  # the command line checks weights, and imports no configurations
    from weir.schemas.config.model_config import ModelConfig

TRAFFIC, STICKY = "weir_traffic", "weir_traffic_sticky"
"""The names of the parameters."""

MAX_ARMS = 16
"""Versions that one rule may name."""

MAX_WEIGHT = 1e9
MAX_VERSION = 2**63 - 1

_STICKY = re.compile(r"(header|parameter):([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128})")
_VERSION = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)


class TrafficRule:
    """The weights of versions, at least one of them above 0, and what keeps a caller on one version ("": nothing).

    Raises ValueError for invalid weights or an invalid `sticky`.
    """

    def __init__(self, weights: Mapping[int, float], sticky: str = "") -> None:
        if not weights or not any(weights.values()):
            raise ValueError("at least one version must have a weight above 0")
        if len(weights) > MAX_ARMS:
            raise ValueError(f"{len(weights)} versions have weights; at most {MAX_ARMS} may")
        for version, weight in weights.items():
            if not 0 < version <= MAX_VERSION:
                raise ValueError(f"version must be a number from 1 to {MAX_VERSION}, got {version}")
            if not (math.isfinite(weight) and 0 <= weight <= MAX_WEIGHT):
                raise ValueError(
                    f"the weight of version {version} must be a number from 0 to {MAX_WEIGHT:.0f}, got {weight}"
                )
        if sticky and not _STICKY.fullmatch(sticky):
            raise ValueError(f"sticky must be header:NAME or parameter:NAME, got '{sticky[:200]}'")
        self.weights = dict(sorted(weights.items()))
        self.sticky = sticky.lower() if sticky.startswith("header:") else sticky

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrafficRule) and (self.weights, self.sticky) == (other.weights, other.sticky)

    def __hash__(self) -> int:
        return hash((tuple(self.weights.items()), self.sticky))

    def __repr__(self) -> str:
        return f"TrafficRule({weights_text(self.weights)}{f' {self.sticky}' if self.sticky else ''})"

    @cached_property
    def header(self) -> str:
        """The name of the sticky header in lower case, "" without one."""
        kind, _, name = self.sticky.partition(":")
        return name if kind == "header" else ""

    @cached_property
    def parameter(self) -> str:
        """The name of the sticky request parameter, "" without one."""
        kind, _, name = self.sticky.partition(":")
        return name if kind == "parameter" else ""

    @cached_property
    def shares(self) -> dict[int, float]:
        """The share of each version, of 1."""
        total = sum(self.weights.values())
        return {version: weight / total for version, weight in self.weights.items()}


def read_weights(text: str) -> dict[int, float]:
    """The weights in a text as `1=90 2=10`; commas may separate them too. Raises ValueError with what is wrong."""
    weights: dict[int, float] = {}
    for part in text.replace(",", " ").split():
        version, equals, weight = part.partition("=")
        if not (equals and _VERSION.fullmatch(version)):
            raise ValueError(f"'{part[:100]}' is not VERSION=WEIGHT, as 1=90")
        if int(version) in weights:
            raise ValueError(f"version {version} has two weights")
        try:
            weights[int(version)] = float(weight)
        except ValueError:
            raise ValueError(f"'{weight[:100]}' is not a weight of version {version}: expected a number") from None
    return weights


def weights_text(weights: Mapping[int, float]) -> str:
    """The weights as a text that `read_weights` reads."""
    return " ".join(f"{version}={weight:.10g}" for version, weight in weights.items())


def read_rule(document: Any) -> TrafficRule:
    """The rule in a JSON document `{"weights": {"1": 90, "2": 10}, "sticky": "header:x-user"}`.

    Raises ValueError with what is wrong.
    """
    if not isinstance(document, dict) or not isinstance(document.get("weights"), dict):
        raise ValueError('expected a JSON object with "weights", as {"weights": {"1": 90, "2": 10}}')
    unknown = document.keys() - {"weights", "sticky"}
    if unknown:
        raise ValueError(f"unknown member '{min(map(str, unknown))[:100]}'; expected weights and sticky")
    weights: dict[int, float] = {}
    for version, weight in document["weights"].items():
        if not _VERSION.fullmatch(version):
            raise ValueError(f"'{version[:100]}' is not the number of a version")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"the weight of version {version} must be a number")
        weights[int(version)] = float(min(weight, MAX_WEIGHT * 2))  # a larger integer may have no float
    sticky = document.get("sticky", "")
    if not isinstance(sticky, str):
        raise ValueError("sticky must be a string: header:NAME or parameter:NAME")
    return TrafficRule(weights, sticky)


def rule_of(config: ModelConfig) -> TrafficRule | None:
    """The rule that the configuration declares, None where it declares none. Raises ParameterError."""
    if TRAFFIC not in config.parameters:
        if STICKY in config.parameters:
            raise ParameterError(STICKY, f"has no effect without parameter '{TRAFFIC}'")
        return None
    try:
        weights = read_weights(config.parameter(TRAFFIC))
        TrafficRule(weights)
    except ValueError as error:
        raise ParameterError(TRAFFIC, f"is invalid: {error}") from error
    try:
        return TrafficRule(weights, config.parameter(STICKY))
    except ValueError as error:
        raise ParameterError(STICKY, f"is invalid: {error}") from error
