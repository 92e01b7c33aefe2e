"""`--metrics-config` as Triton reads it."""

from __future__ import annotations

import pytest

from weir.telemetry.metrics_config import DEFAULT_QUANTILES, MetricsConfig, parse_metrics_config


def test_the_default() -> None:
    assert parse_metrics_config([]) == MetricsConfig(True, False, False, DEFAULT_QUANTILES)


def test_the_last_value_of_a_setting_counts() -> None:
    values = [
        "summary_latencies=false",
        "counter_latencies=false",
        "summary_latencies=true",
        "histogram_latencies=true",
    ]
    assert parse_metrics_config(values) == MetricsConfig(False, True, True)


@pytest.mark.parametrize("value", ["summary_latencies", "=true", "summary_latencies=", "", "a,b=true"])
def test_a_malformed_value_is_rejected(value: str) -> None:
    with pytest.raises(ValueError, match="--metrics-config option format is <setting>=<value>"):
        parse_metrics_config([value])


@pytest.mark.parametrize("value", ["summary_latencies=maybe", "foo=bar", "histogram_latencies=True"])
def test_an_unknown_setting_is_ignored_and_logged(value: str, caplog: pytest.LogCaptureFixture) -> None:
    assert parse_metrics_config([value]) == MetricsConfig()
    assert value in caplog.text


@pytest.mark.parametrize(
    ("text", "quantiles"),
    [
        ("0.5:0.05,0.75:0.01", (0.5, 0.75)),
        ("abc,0.5:0.1", (0.5,)),
        ("1.5:0.1,0.5:0.1,x:0.1", (0.5,)),
        ("abc", DEFAULT_QUANTILES),
    ],
)
def test_quantiles(text: str, quantiles: tuple[float, ...]) -> None:
    assert parse_metrics_config([f"summary_quantiles={text}"]).quantiles == quantiles
