"""How `weir init` batches a model, and the configuration it writes: a server accepts it, and reads what was meant."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes import tensorrt_module
from weir.commands.init.configuration import (
    DEFAULT_LARGEST_BATCH,
    choose_batching,
    config_text,
    effective,
    make_config,
)
from weir.repository.completion import ARTIFACTS, DefaultArtifact, DescribedModel, DescribedTensor
from weir.repository.config_text import parse_config
from weir.repository.problems import ConfigProblem
from weir.schemas.core.tensors import BY_CONFIG_NAME
from weir.worker.backends.tensorrt.engine import TensorRtEngine

ONNX = DefaultArtifact("model.onnx", "onnxruntime", "onnxruntime_onnx")


def model(*rows: tuple[str, list[int], str], largest: int | None = None) -> DescribedModel:
    """The last row is the output; rows are name, shape, and the symbol of the first dimension."""
    tensors = [DescribedTensor(name, "TYPE_FP32", dims, symbol) for name, dims, symbol in rows]
    return DescribedModel(tensors[:-1], tensors[-1:], largest_batch=largest)


@pytest.mark.parametrize(
    ("described", "wanted", "largest", "reason"),
    [
        (model(("x", [-1, 3], "n"), ("y", [-1], "n")), None, DEFAULT_LARGEST_BATCH, "variable, so requests are joined"),
        (model(("x", [-1, 3], ""), ("y", [-1], "")), None, DEFAULT_LARGEST_BATCH, "variable, so requests are joined"),
        (model(("x", [-1, 3], "n"), ("y", [-1], "n"), largest=4), None, 4, "The file sets this limit."),
        (model(("x", [-1, 3], "n"), ("y", [-1], "n"), largest=64), None, DEFAULT_LARGEST_BATCH, "Raise max_batch_size"),
        (model(("x", [-1, 3], "n"), ("y", [-1], "n"), largest=64), 64, 64, "at most this size"),
        (model(("x", [-1, 3], "n"), ("y", [-1], "n")), 0, 0, "as --max-batch-size=0 asks"),
        (model(("x", [1, 3], ""), ("y", [-1], "n")), None, 0, "the first dimension is not variable in x [1, 3]."),
        (model(("x", [], ""), ("y", [-1], "n")), None, 0, "the first dimension is not variable in x []."),
        (
            model(("x", [-1, 3], "width"), ("y", [-1], "n")),
            None,
            0,
            "the first dimensions are not the same (width of x, n of y).",
        ),
        (DescribedModel([], []), None, 0, "its inputs and outputs are not known"),
    ],
)
def test_batching_is_chosen_by_the_first_dimension(
    described: DescribedModel, wanted: int | None, largest: int, reason: str
) -> None:
    batching = choose_batching(described, wanted)
    assert batching.largest == largest
    assert reason in batching.reason


@pytest.mark.parametrize(
    ("described", "wanted", "text"),
    [
        (
            model(("x", [2, 3], ""), ("y", [-1], "n")),
            4,
            "can't be batched: the first dimension is not variable in x [2, 3]",
        ),
        (model(("x", [-1, 3], "n"), ("y", [-1], "n"), largest=4), 5, "the model takes batches of at most 4, not 5"),
    ],
)
def test_batches_that_the_model_does_not_take_are_refused(described: DescribedModel, wanted: int, text: str) -> None:
    with pytest.raises(ConfigProblem) as raised:
        choose_batching(described, wanted)
    assert text in raised.value.message


ROWS = st.tuples(
    st.sampled_from(sorted(BY_CONFIG_NAME)),
    st.lists(st.sampled_from([-1, 1, 2, 7]), max_size=4),
)


@given(
    st.lists(ROWS, min_size=1, max_size=3),
    st.lists(ROWS, min_size=1, max_size=3),
    st.sampled_from([artifact for artifact in ARTIFACTS if artifact.backend not in ("openvino", "python")]),
    st.booleans(),
    st.sampled_from([None, 0, 1, 3]),
)
def test_the_file_is_accepted_and_means_the_same(
    inputs: list[tuple[str, list[int]]],
    outputs: list[tuple[str, list[int]]],
    artifact: DefaultArtifact,
    batches: bool,
    wanted: int | None,
) -> None:
    front = [-1] if batches else []
    described = DescribedModel(
        *(
            [DescribedTensor(f"{prefix}{place}", kind, [*front, *dims]) for place, (kind, dims) in enumerate(rows)]
            for prefix, rows in (("x", inputs), ("y", outputs))
        )
    )
    can_batch = described.can_batch
    batching = choose_batching(described, wanted if can_batch else None)
    config = make_config("m", artifact, described, batching)
    text = config_text(config, "Made by a test.", batching)
    assert parse_config(text.encode(), "config.pbtxt") == config.replace()
    served = effective(text, described)
    assert served.max_batch_size == batching.largest
    assert (served.dynamic_batching is not None) == (batching.largest > 1)
    dropped = 1 if batching.largest else 0
    for rows, made in ((described.inputs, served.input), (described.outputs, served.output)):
        shown = {tensor.name: (tensor.data_type, [] if tensor.reshape is not None else tensor.dims) for tensor in made}
        assert shown == {row.name: (row.data_type, list(row.dims)[dropped:]) for row in rows}


def test_comments_are_comments() -> None:
    described = model(("x", [-1, 3], "n"), ("y", [-1], "n"))
    batching = choose_batching(described)
    config = make_config("m", ONNX, described, batching)
    text = config_text(config, "Made from a\nfile with a name " + "of many words " * 20, batching)
    assert all(len(line) < 120 for line in text.splitlines())
    assert text.startswith("# Made from a\n# file with")
    assert effective(text, described).max_batch_size == DEFAULT_LARGEST_BATCH


def test_a_plan_is_batched_up_to_the_limit_of_its_profile() -> None:
    logger = SimpleNamespace(log=lambda severity, message: None)
    described = TensorRtEngine(tensorrt_module, tensorrt_module.plan(), logger).described()
    assert described.largest_batch is not None
    batching = choose_batching(described)
    assert batching.largest == min(described.largest_batch, DEFAULT_LARGEST_BATCH)
    artifact = next(artifact for artifact in ARTIFACTS if artifact.filename == "model.plan")
    config = make_config("m", artifact, described, batching)
    served = effective(config_text(config, "Made by a test.", batching), described)
    assert (served.backend, [tensor.dims for tensor in served.input]) == ("tensorrt", [[4]])
