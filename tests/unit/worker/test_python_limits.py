"""Limits of Python models' processes: where they come from, and what they say."""

import pytest

from schemas.errors import WeirError
from schemas.model_config import ModelConfig, ModelParameter
from worker.backends.python_limits import ProcessLimits, Verdict


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(
        name="m", parameters={f"weir_{name}": ModelParameter(string_value=text) for name, text in parameters.items()}
    )


def test_without_any_nobody_looks() -> None:
    limits = ProcessLimits.of(config(), {})
    assert limits == ProcessLimits()
    assert limits.look_every_s == 0
    assert limits.verdict(1e9, 1 << 60) is Verdict.FINE


def test_a_model_s_own_come_before_the_backend_s() -> None:
    settings = {"execution-timeout-ms": "1000", "memory-limit-bytes": "5", "stub-timeout-seconds": "7"}
    assert ProcessLimits.of(config(), settings) == ProcessLimits(1.0, 5, 7.0)
    assert ProcessLimits.of(config(execution_timeout_ms="0", memory_limit_bytes="9"), settings) == ProcessLimits(
        0, 9, 7
    )


@pytest.mark.parametrize("text", ["-1", "1.5", "ten", "9" * 19, "²"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(WeirError, match="weir_execution_timeout_ms of model 'm' must be a whole number"):
        ProcessLimits.of(config(execution_timeout_ms=text), {})
    with pytest.raises(WeirError, match="memory-limit-bytes must be a whole number"):
        ProcessLimits.of(config(), {"memory-limit-bytes": text})


@pytest.mark.parametrize(
    ("silent_s", "resident", "verdict"),
    [
        (None, 10, Verdict.FINE),
        (1.0, 100, Verdict.FINE),
        (1.1, 1000, Verdict.HUNG),
        (None, 101, Verdict.LARGE),
        (0.5, 200, Verdict.LARGE),
        (0.5, 201, Verdict.RUNAWAY),
    ],
)
def test_verdicts(silent_s: float | None, resident: int, verdict: Verdict) -> None:
    limits = ProcessLimits(execution_timeout_s=1.0, memory_limit_bytes=100)
    assert limits.verdict(silent_s, resident) is verdict
