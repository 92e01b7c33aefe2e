"""`MetricsConfig`: the latency metrics that `--metrics-config` selects.

Source: Triton's option, as its server reads it: a value is `<setting>=<value>`, the last value of a setting counts,
and unknown settings are ignored. Here they are also logged, because a misspelt setting is hard to notice otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

logger = logging.getLogger("weir.telemetry")

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)

_SWITCHES = ("counter_latencies", "histogram_latencies", "summary_latencies")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Which latency metrics exist. Without `counter_latencies` the other counters of models do not change either."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES


def parse_metrics_config(values: Iterable[str]) -> MetricsConfig:
    """Returns the configuration for the option's values. Raises ValueError for a malformed value."""
    settings: dict[str, str] = {}
    for value in values:
        name, separator, setting = value.partition("=")
        if not (name and separator and setting) or "," in name:
            raise ValueError(f"--metrics-config option format is <setting>=<value>. Got {value}")
        settings[name] = setting
    switches: dict[str, bool] = {}
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    for name, setting in settings.items():
        if name == "summary_quantiles":
            quantiles = _quantiles(setting) or DEFAULT_QUANTILES
        elif name in _SWITCHES and setting in ("true", "false"):
            switches[name] = setting == "true"
        else:
            logger.warning("--metrics-config %s=%s has no effect", name, setting)
    return MetricsConfig(**switches, quantiles=quantiles)


def _quantiles(text: str) -> tuple[float, ...]:
    """Returns the quantiles of `<quantile>:<error>,...`; the errors belong to another algorithm and are ignored."""
    quantiles: list[float] = []
    for pair in text.split(","):
        quantile, separator, _ = pair.partition(":")
        if not separator:
            logger.error("Invalid option: [%s]. No ':' delimiter found. Expected format is <quantile>:<error>", pair)
            continue
        try:
            value = float(quantile)
        except ValueError:
            value = -1.0
        if 0 <= value <= 1:
            quantiles.append(value)
        else:
            logger.error("Invalid option: [%s]. A quantile lies between 0 and 1", pair)
    return tuple(quantiles)
