"""Fields of a configuration that fail a load or are reported at load."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from weir.repository.config_text import parse_config
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.worker.backend_api.config_support import IGNORED, LIMITS, REFUSED, FieldLimit, check_supported, values_at

ROOT = Path(__file__).parents[4]

SNIPPETS = {
    "input.format": 'input { name: "A" format: FORMAT_NHWC }',
    "input.is_non_linear_format_io": 'input { name: "A" is_non_linear_format_io: true }',
    "output.is_non_linear_format_io": 'output { name: "A" is_non_linear_format_io: true }',
    "optimization.priority": "optimization { priority: PRIORITY_MAX }",
    "optimization.cuda.graph_spec.graph_lower_bound": (
        "optimization { cuda { graph_spec { graph_lower_bound { batch_size: 1 } } } }"
    ),
    "optimization.gather_kernel_buffer_threshold": "optimization { gather_kernel_buffer_threshold: 1 }",
    "optimization.eager_batching": "optimization { eager_batching: true }",
    "sequence_batching.state.use_same_buffer_for_input_output": (
        'backend: "onnxruntime" sequence_batching { state { use_same_buffer_for_input_output: true } }'
    ),
    "sequence_batching.state.use_growable_memory": (
        'backend: "onnxruntime" sequence_batching { state { use_growable_memory: true } }'
    ),
    "sequence_batching.oldest.preserve_ordering": "sequence_batching { oldest { preserve_ordering: true } }",
    "instance_group.secondary_devices": "instance_group { secondary_devices { device_id: 1 } }",
    "model_repository_agents": 'model_repository_agents { agents { name: "checksum" } }',
}
"""A configuration that sets each field of the table."""


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.path)
def test_a_limited_field_is_reported_at_load(limit: FieldLimit, caplog: pytest.LogCaptureFixture) -> None:
    config = parse_config(SNIPPETS[limit.path].encode(), "m/config.pbtxt").replace(name="m")
    with caplog.at_level(logging.WARNING):
        if limit.effect == REFUSED:
            with pytest.raises(WeirError, match=re.escape(limit.why)) as refused:
                check_supported(config)
            assert refused.value.http_status == 501
        else:
            check_supported(config)
    told = [record.getMessage() for record in caplog.records]
    assert told == ([f"model 'm': field '{limit.path}' has no effect: {limit.why}"] if limit.effect == IGNORED else [])


def test_a_plain_configuration_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    check_supported(ModelConfig(name="m"))
    assert not caplog.records


def test_only_some_backends_support_implicit_states() -> None:
    text = 'backend: "%s" sequence_batching { state { input_name: "A" output_name: "B" } }'
    check_supported(parse_config((text % "onnxruntime").encode(), "m/config.pbtxt"))
    with pytest.raises(WeirError, match="backend 'python' does not support implicit states"):
        check_supported(parse_config((text % "python").encode(), "m/config.pbtxt"))


def test_values_are_found_in_lists_and_absent_messages_have_none() -> None:
    config = parse_config(b'instance_group [{ count: 1 }, { count: 2 }] output { name: "A" }', "m/config.pbtxt")
    assert list(values_at(config, "instance_group.count")) == [1, 2]
    assert list(values_at(config, "sequence_batching.state")) == []


def leaves(message: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """The paths of all scalar fields of a configuration, with the fields' names."""
    found: dict[str, str] = {}
    for name, field in message.model_fields.items():
        path = f"{prefix}{name}"
        inner = [one for one in _types(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        if inner:
            found |= leaves(inner[0], f"{path}.")
        else:
            found[path] = name
    return found


def _types(annotation: Any) -> list[Any]:
    arguments = getattr(annotation, "__args__", ())
    return [annotation, *(inner for argument in arguments for inner in _types(argument))]


def test_every_field_that_nothing_reads_is_in_the_table() -> None:
    """Every field is either read by the code behind the parser and its checks, or it is listed in `LIMITS`."""
    sources = [
        path.read_text()
        for folder in ("worker", "scheduler", "gateway", "weir/calls", "weir/durable", "weir/jobs")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "config_support.py"
    ]
    read_there = ("layout.py", "completion.py", "dependencies.py")
    sources += [(ROOT / "weir/repository" / name).read_text() for name in read_there]
    sources.append((ROOT / "schemas" / "config" / "model_config.py").read_text())  # properties that read fields
    code = "\n".join(sources) + (ROOT / "schemas" / "kserve" / "normalizer.py").read_text()
    limited = tuple(limit.path for limit in LIMITS)
    read = {path: re.search(rf"\.{name}\b", code) for path, name in leaves(ModelConfig).items()}
    unread = [path for path, found in read.items() if not found]
    assert [path for path in unread if not any(path == one or path.startswith(f"{one}.") for one in limited)] == []
