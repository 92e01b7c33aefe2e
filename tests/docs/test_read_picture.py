"""Pictures are read exactly, alone and side by side, upright and tilted."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tritonclient import http
from tritonclient.utils import InferenceServerException

from tests.support.servers.demo import Served, environment
from weir.demo.pictures import LINES, read, rendered


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[http.InferenceServerClient]:
    with http.InferenceServerClient(served.here("localhost:8000")) as client:
        yield client


def texts(client: http.InferenceServerClient, picture: bytes) -> list[str]:
    return [line.text for line in read(client, picture)]


def ask(client: http.InferenceServerClient, model: str, **tensors: np.ndarray) -> dict[str, np.ndarray]:
    inputs = []
    for name, tensor in tensors.items():
        datatype = (
            "BYTES"
            if tensor.dtype == np.object_
            else {"uint8": "UINT8", "float32": "FP32", "int64": "INT64"}[tensor.dtype.name]
        )
        inputs.append(http.InferInput(name, list(tensor.shape), datatype))
        inputs[-1].set_data_from_numpy(tensor)
    answer = client.infer(model, inputs)
    return {output["name"]: answer.as_numpy(output["name"]) for output in answer.get_response()["outputs"]}


def test_the_lines_are_read_from_the_top_down(client: http.InferenceServerClient) -> None:
    lines = read(client, rendered(LINES))
    assert tuple(line.text for line in lines) == LINES
    assert all(line.score > 0.9 for line in lines)
    tops = [line.corners[0, 1] for line in lines]
    assert tops == sorted(tops)


def test_pictures_of_many_sizes_at_once(served: Served) -> None:
    def read_alone(picture: bytes) -> list[str]:
        with http.InferenceServerClient(served.here("localhost:8000")) as client:  # one is for one thread
            return texts(client, picture)

    pictures = [rendered(LINES[:count], height) for count in (1, 2, 3) for height in (28, 36)]
    with ThreadPoolExecutor(4) as callers:
        read_at_once = list(callers.map(read_alone, pictures))
    assert read_at_once == [list(LINES[:count]) for count in (1, 2, 3) for _ in (28, 36)]


def test_tilted_text(client: http.InferenceServerClient) -> None:
    upright = Image.open(io.BytesIO(rendered(LINES)))
    tilted = io.BytesIO()
    upright.rotate(5, Image.Resampling.BICUBIC, expand=True, fillcolor="white").save(tilted, "PNG")
    assert texts(client, tilted.getvalue()) == list(LINES)


def test_a_picture_without_text(client: http.InferenceServerClient) -> None:
    assert texts(client, rendered(("",))) == []


@pytest.mark.parametrize("content", [b"this is no picture", b""])
def test_what_is_no_picture(client: http.InferenceServerClient, content: bytes) -> None:
    with pytest.raises(InferenceServerException, match=r"in ensemble 'ocr', .*IMAGE is not a picture"):
        read(client, content)


def test_padding_does_not_change_what_is_read(client: http.InferenceServerClient) -> None:
    scaled = ask(client, "ocr_prepare", IMAGE=np.array([rendered(LINES)], np.object_))
    (likelihood,) = ask(client, "ocr_det", x=scaled["SCALED"]).values()
    cut = ask(client, "ocr_crop", PICTURE=scaled["PICTURE"], LIKELIHOOD=likelihood)
    widths = [np.flatnonzero(strip.any(axis=(0, 1))).max() + 1 for strip in cut["LINES"]]
    assert min(widths) < max(widths) == cut["LINES"].shape[3]
    for box, strip, width, expected in zip(cut["BOX"], cut["LINES"], widths, LINES, strict=True):
        seen = ask(client, "ocr_rec", x=np.ascontiguousarray(strip[None, :, :, :width]))
        (text,) = ask(client, "ocr_decode", BOX=box[None], **seen)["TEXT"]
        assert text.decode() == expected


def test_a_picture_of_a_file_is_read(served: Served, tmp_path: Path) -> None:
    (tmp_path / "sign.png").write_bytes(rendered(("Mind the gap!",)))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "examples.read_picture",
            served.here("--url=localhost:8000"),
            str(tmp_path / "sign.png"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "sign.png" in done.stdout
    assert "Mind the gap!" in done.stdout
