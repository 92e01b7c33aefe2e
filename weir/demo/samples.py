"""Files to try the demo's models with: a picture with text, a voice, and the items of an offline job."""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weir.demo.networks import MAGIKA, RAPIDOCR, SILERO, Network
from weir.demo.speech import RATE_HZ

ITEMS = 1000
"""Items of the job: it runs for some seconds."""

_FILES = (
    "SELECT name, price FROM products WHERE price > {} ORDER BY name;\n",
    "def area(width, height={}):\n    return width * height\n\n\nprint(area(2))\n",
    '#!/bin/sh\nset -e\nfor file in *.log; do\n  gzip -{} "$file"\ndone\n',
    "<!doctype html>\n<html><head><title>{}</title></head><body><p>A weir</p></body></html>\n",
    "# A weir\n\nA *weir* is a low dam, number {}.\n\n- It turns uneven flow\n- into a steady one.\n",
    '{{"name": "weir", "number": {}, "steady": true, "gates": [1, 2, 3]}}\n',
)


def write_samples(folder: Path, networks: Sequence[Network]) -> Path:
    """Writes the files for the models of these networks to `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    if RAPIDOCR in networks:
        from weir.demo.pictures import LINES, rendered

        (folder / "picture.png").write_bytes(rendered(LINES))
    if SILERO in networks:
        from weir.demo.sound import synthesised

        _write_wave(folder / "voice.wav", synthesised()["voice, then silence"])
    if MAGIKA in networks:
        lines = (json.dumps({"id": f"file-{number}", "FILE": _file(number)}) for number in range(ITEMS))
        (folder / "files.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _file(number: int) -> str:
    return _FILES[number % len(_FILES)].format(number)


def _write_wave(path: Path, samples: np.ndarray) -> None:
    """Writes fp32 samples in -1 .. 1 as 16 bits, mono."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
