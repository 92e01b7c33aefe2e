"""Deprecated options set their replacements, and yield to them."""

from typing import Any

import pytest

from weir.commands.option_commands import read_values
from weir.options import SERVE, UsageError, options_of
from weir.options.deprecated import replaced

OPTIONS = options_of(SERVE)


def meaning(**texts: Any) -> tuple[dict[str, Any], list[str]]:
    return replaced(read_values(OPTIONS, texts))


def test_nothing_deprecated_changes_nothing() -> None:
    values, warnings = meaning(trace_config=["level=TENSORS"])
    assert values["trace_config"] == ("level=TENSORS",)
    assert not values["disable_auto_complete_config"]
    assert warnings == []


def test_strict_model_config() -> None:
    values, warnings = meaning(strict_model_config="true")
    assert values["disable_auto_complete_config"]
    assert warnings == [
        "'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead."
    ]
    assert not meaning(strict_model_config="false")[0]["disable_auto_complete_config"]
    values, warnings = meaning(strict_model_config="false", disable_auto_complete_config="true")
    assert values["disable_auto_complete_config"]
    assert "Overriding deprecated '--strict-model-config' from False to True" in warnings[1]


def test_the_size_of_the_response_cache() -> None:
    values, warnings = meaning(response_cache_byte_size="1024")
    assert values["cache_config"] == ("local,size=1024",)
    assert warnings[0].endswith("CLI args would be: '--cache-config=local,size=1024'")
    with pytest.raises(UsageError, match=r"^Incompatible flags --response-cache-byte-size and --cache-config both"):
        meaning(response_cache_byte_size="1024", cache_config=["local,size=1024"])


def test_trace_options_become_trace_configuration() -> None:
    values, warnings = meaning(
        trace_file="here",
        trace_level=["TIMESTAMPS", "tensors"],
        trace_rate="5",
        trace_count="-1",
        trace_log_frequency="2",
        trace_config=["mode=triton"],
    )
    assert values["trace_config"] == (
        "triton,file=here",
        "level=TIMESTAMPS",
        "level=TENSORS",
        "rate=5",
        "count=-1",
        "triton,log-frequency=2",
        "mode=triton",
    )
    assert len(warnings) == 5
    assert warnings[0].endswith("Please use '--trace-config triton,file=<filepath> instead.")


def test_a_setting_given_in_both_ways_is_that_of_trace_config() -> None:
    values, warnings = meaning(trace_rate="5", trace_file="a", trace_config=["rate=7", "triton,file=b"])
    assert values["trace_config"] == ("rate=7", "triton,file=b")
    assert warnings[1] == "Overriding deprecated '--trace-file' in favor of provided file in --trace-config!"
    assert warnings[3] == "Overriding deprecated '--trace-rate' in favor of provided rate in --trace-config!"
