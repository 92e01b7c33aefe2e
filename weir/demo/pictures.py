"""Reads the text in pictures through the ensemble `ocr`. A picture with text can be rendered here."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.table import Table
from tritonclient import http

MODEL = "ocr"
LINES = ("A weir is a low dam", "that turns uneven flow", "into a steady one.")


class Line(NamedTuple):
    """A line of text as it was read, how certain that is (0 .. 1), and its corners, fp32 [4, 2], in pixels."""

    text: str
    score: float
    corners: np.ndarray


def read(client: http.InferenceServerClient, picture: bytes) -> list[Line]:
    """The lines of text in an encoded picture, in reading order."""
    image = http.InferInput("IMAGE", [1], "BYTES")
    image.set_data_from_numpy(np.array([picture], np.object_))
    answer = client.infer(MODEL, [image])
    texts, scores, boxes = (answer.as_numpy(name) for name in ("TEXT", "SCORE", "BOX"))
    return [
        Line(text.decode(), float(score), corners) for text, score, corners in zip(texts, scores, boxes, strict=True)
    ]


def lines_table(name: str, lines: list[Line]) -> Table:
    """What was read, line by line."""
    table = Table(title=f"Text read from {name}", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("line", "score", "upper left", "lower right"):
        table.add_column(column, justify="left" if column == "line" else "right")
    for line in lines:
        corners = (f"{x:.0f}, {y:.0f}" for x, y in line.corners[[0, 2]])
        table.add_row(line.text, f"{line.score:.3f}", *corners)
    return table


def rendered(lines: tuple[str, ...], height: int = 36) -> bytes:
    """A PNG with these lines in Pillow's own font; `height` is the font's, in pixels."""
    font = ImageFont.load_default(height)
    width = int(max(font.getlength(line) for line in lines)) + 2 * height
    picture = Image.new("RGB", (width, 2 * height * len(lines)), "white")
    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        draw.text((height, height * (2 * number + 0.4)), line, fill="midnightblue", font=font)
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return encoded.getvalue()
