"""Small pictures as files, and the expected output of a model for each."""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np

SIDE = 32
FILES_A_FOLDER = 1000


def write_images(folder: Path, count: int, seed: int) -> None:
    """PNG files of 32 by 32 pixels, a thousand a folder: gradients with some noise, none like another."""
    random = np.random.default_rng(seed)
    across, down = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    for first in range(0, count, FILES_A_FOLDER):
        place = folder / f"{first // FILES_A_FOLDER:05d}"
        place.mkdir(parents=True)
        for number in range(first, min(first + FILES_A_FOLDER, count)):
            slopes = random.integers(0, 8, (2, 3))
            pixels = across[:, :, None] * slopes[0] + down[:, :, None] * slopes[1]
            pixels = (pixels + random.integers(0, 16, pixels.shape)).astype(np.uint8)
            (place / f"{number:08d}.png").write_bytes(png(pixels, number))


def png(pixels: np.ndarray, number: int) -> bytes:
    """`pixels` (rows, columns, 3) as a PNG file that also names its number."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (
        (b"IHDR", head),
        (b"tEXt", b"Title\0%d" % number),
        (b"IDAT", zlib.compress(rows.tobytes(), 1)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def digest_of(file: bytes) -> tuple[str, float]:
    """What model `digest` must say of a file."""
    return hashlib.sha256(file).hexdigest(), float(np.frombuffer(file, np.uint8).mean())
