"""Items in JSON Lines: what a line may be, what becomes of a broken one, and where a job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gateway.job_models import model
from weir.jobs.formats import jsonl as json_lines
from weir.jobs.formats.files import JobInput, open_input
from weir.jobs.formats.items import JobItem
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError

NUMBERS = model(X=("FP32", [-1]))


def opened(path: Path, content: bytes, config: ModelConfig = NUMBERS) -> JobInput:
    file = path / "in.jsonl"
    file.write_bytes(content)
    return open_input([file], None, config)


def told(item: JobItem) -> Any:
    if isinstance(item.inputs, WeirError):
        return item.inputs.message
    return {tensor.name: (tensor.datatype, tuple(tensor.shape), tensor.to_numpy().tolist()) for tensor in item.inputs}


def only(path: Path, line: bytes, config: ModelConfig) -> Any:
    (item,) = opened(path, line, config).items()
    return told(item)


def test_a_line_is_a_request_or_an_object_of_values(tmp_path: Path) -> None:
    request = b'{"id":"mine","inputs":[{"name":"X","datatype":"FP32","shape":[2,2],"data":[1,2,3,4]}]}'
    more = request.replace(b'"id":"mine"', b'"parameters":{"priority":2},"outputs":[{"name":"Y"}]')
    items = list(opened(tmp_path, b'{"X":[1.5,2]}\n\n' + request + b"\r\n" + more).items())
    assert [(item.number, item.source) for item in items] == [(0, "in.jsonl:1"), (1, "mine"), (2, "in.jsonl:4")]
    assert told(items[0]) == {"X": ("FP32", (1, 2), [[1.5, 2.0]])}
    assert told(items[1]) == told(items[2]) == {"X": ("FP32", (2, 2), [[1.0, 2.0], [3.0, 4.0]])}
    assert items[0].request is items[1].request is None
    asked = items[2].request
    assert asked is not None
    assert (asked.priority, [output.name for output in asked.outputs]) == (2, ["Y"])


@pytest.mark.parametrize(
    ("datatype", "dims", "given", "shape", "values"),
    [
        ("FP32", [1], b"7", (1, 1), [[7.0]]),
        ("FP32", [2, 2], b"[[1,2],[3,4]]", (1, 2, 2), [[[1.0, 2.0], [3.0, 4.0]]]),
        ("FP32", [2, 2], b"[1,2,3,4]", (1, 2, 2), [[[1.0, 2.0], [3.0, 4.0]]]),
        ("FP32", [2], b"[[1,2],[3,4]]", (2, 2), [[1.0, 2.0], [3.0, 4.0]]),
        ("FP32", [-1], b"[]", (1, 0), [[]]),
        ("FP64", [1], b"[-Infinity]", (1, 1), [[-np.inf]]),
        ("FP16", [2], b"[0.5,1e9]", (1, 2), [[0.5, np.inf]]),
        ("BF16", [2], b"[1,-2]", (1, 2), [[0x3F80, 0xC000]]),
        ("BOOL", [1], b"true", (1, 1), [[True]]),
        ("UINT64", [1], b"[18446744073709551615]", (1, 1), [[2**64 - 1]]),
        ("BYTES", [1], '"é"'.encode(), (1, 1), [["é".encode()]]),
        ("BYTES", [2], b'["a",{"base64":"/wA="}]', (1, 2), [[b"a", b"\xff\0"]]),
    ],
)
def test_values_of_plain_objects(
    tmp_path: Path, datatype: str, dims: list[int], given: bytes, shape: tuple[int, ...], values: Any
) -> None:
    expected = {"X": (datatype, shape, values)}
    assert only(tmp_path, b'{"X":' + given + b"}", model(X=(datatype, dims))) == expected


def test_a_model_without_batching_gets_no_batch_dimension(tmp_path: Path) -> None:
    plain = model(0, X=("INT8", [2]), inputs=("INT8", [-1]))
    assert only(tmp_path, b'{"X":[1,2],"inputs":[3]}', plain) == {
        "X": ("INT8", (2,), [1, 2]),
        "inputs": ("INT8", (1,), [3]),
    }
    request = b'{"inputs":[{"name":"X","datatype":"INT8","shape":[2],"data":[1,2]}]}'
    assert only(tmp_path, request, plain) == {"X": ("INT8", (2,), [1, 2])}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "failed to parse the request JSON buffer"),
        (b"\xff", "failed to parse"),
        (b"[1]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"\0", "failed to parse"),
        (b'{"Z":[1]}', "unexpected inference input 'Z' for model 'm'"),
        (b'{"X":["a"]}', "non-number"),
        (b'{"X":null}', "non-number"),
        (b'{"X":{}}', "non-number"),
        (b'{"X":[[1,2],[3]]}', "lists of unequal lengths"),
        (b'{"X":[[1,2],3]}', "lists of unequal lengths"),
        (b'{"X":[[[1]]]}', "value of shape [1, 1, 1] does not fit input 'X' with dims [-1]"),
        (b'{"X":' + b"[" * 200 + b"]" * 200 + b"}", "nesting depth"),
        (b'{"inputs":1}', "non-array"),
        (b'{"inputs":[1]}', "Input must set only one"),
        (b'{"inputs":[],"id":1}', "non-string"),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[9],"data":[1]}]}', "Shape does not match"),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}', "unexpected size"),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"parameters":{"shared_memory_region":"r",'
         b'"shared_memory_byte_size":4}}]}', "shared memory"),
        (b'{"inputs":[],"parameters":{"sequence_id":[]}}', "non-string"),
    ],
)  # fmt: skip
def test_a_broken_line_is_an_item_in_error(tmp_path: Path, line: bytes, why: str) -> None:
    good = b'{"X":[1]}'
    first, broken, last = opened(tmp_path, good + b"\n" + line + b"\n" + good).items()
    assert told(first) == told(last) == {"X": ("FP32", (1, 1), [[1.0]])}
    assert broken.source == "in.jsonl:2"
    assert why.lower() in told(broken).lower()


def test_strings_that_are_no_base64(tmp_path: Path) -> None:
    for text in (b'{"base64":"*"}', b'{"base64":1}', b'{"b64":""}', b"{}"):
        assert "neither a string nor bytes" in only(tmp_path, b'{"X":[' + text + b"]}", model(X=("BYTES", [1])))


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_ITEM_BYTES", 100)
    monkeypatch.setattr(json_lines, "CHUNK_BYTES", 16)
    long = b'{"X":[' + b"1," * 80 + b"1]}"
    for end in (b"", b"\n", b'\n{"X":[2]}'):
        items = list(opened(tmp_path, b'{"X":[1]}\n' + long + end).items())
        assert told(items[1]) == "line is longer than 100 bytes"
        assert len(items) == 3 if end[1:] else 2
        assert told(items[-1]) == {"X": ("FP32", (1, 1), [[2.0]])} if end[1:] else True


LINES = st.lists(st.sampled_from([b'{"X":[%d]}', b"", b" ", b"\t\r", b"broken", b"\r", b'  {"X":[%d]}']), max_size=40)


@given(lines=LINES, ending=st.sampled_from([b"", b"\n", b"\n\n"]), chunk=st.integers(1, 60), noted=st.integers(1, 5))
def test_counting_and_going_on_agree_with_reading(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ending: bytes, chunk: int, noted: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    content = b"\n".join(line % place if b"%d" in line else line for place, line in enumerate(lines)) + ending
    expected = [
        (f"in.jsonl:{place}", line) for place, line in enumerate(content.split(b"\n"), 1) if line.strip(b" \t\r")
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_lines, "CHUNK_BYTES", chunk)
        patched.setattr(json_lines, "MAX_NOTED_LINES", noted)
        given = opened(folder, content)
        assert given.count() == len(expected)
        for start in range(len(expected) + 2):
            items = list(given.items(start))
            assert [item.number for item in items] == list(range(start, len(expected)))
            assert [item.source for item in items] == [source for source, _ in expected[start:]]
            for item, (_, line) in zip(items, expected[start:], strict=True):
                if line == b"broken":
                    assert isinstance(item.inputs, WeirError)
                else:
                    assert told(item) == {"X": ("FP32", (1, 1), [orjson.loads(line)["X"]])}


def test_a_file_that_changes_while_it_is_read_keeps_its_number_of_items(tmp_path: Path) -> None:
    given = opened(tmp_path, b'{"X":[1]}\n' * 5)
    before = given.fingerprint()
    assert given.count() == 5
    (tmp_path / "in.jsonl").write_bytes(b'{"X":[1]}\n' * 3)
    items = list(given.items(1))
    assert [item.number for item in items] == [1, 2, 3, 4]
    assert "has changed" in told(items[-1])
    assert given.fingerprint() != before
    (tmp_path / "in.jsonl").write_bytes(b'{"X":[1]}\n' * 9)
    assert [item.number for item in given.items()] == [0, 1, 2, 3, 4]
    (tmp_path / "in.jsonl").unlink()
    assert [told(item) for item in given.items(4)] == ["'in.jsonl' does not exist"]


def test_an_object_of_values_may_have_an_id(tmp_path: Path) -> None:
    lines = b'{"id":"a1","X":[1]}\n{"X":[2]}\n{"id":7,"X":[3]}\n{"id":"","X":[4]}'
    items = list(opened(tmp_path, lines).items())
    assert [item.source for item in items] == ["a1", "in.jsonl:2", "in.jsonl:3", "in.jsonl:4"]
    assert [told(item) for item in items[:2]] == [{"X": ("FP32", (1, 1), [[value]])} for value in (1.0, 2.0)]
    assert told(items[2]) == "'id' of an item must be a string, got: 7"
    # An input of this name is meant before an id.
    (item,) = opened(tmp_path, b'{"id":[1]}', model(id=("FP32", [-1]))).items()
    assert (item.source, told(item)) == ("in.jsonl:1", {"id": ("FP32", (1, 1), [[1.0]])})
