"""The demo's files to try its models with."""

from __future__ import annotations

import json
import wave
from pathlib import Path

from weir.demo.networks import MAGIKA, SILERO
from weir.demo.samples import ITEMS, write_samples


def test_files_are_written_for_the_models_at_hand(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "samples", [MAGIKA, SILERO])
    assert {path.name for path in folder.iterdir()} == {"voice.wav", "files.jsonl"}
    with wave.open(str(folder / "voice.wav")) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (1, 16_000, 64_000)
    items = [json.loads(line) for line in (folder / "files.jsonl").read_text().splitlines()]
    assert len(items) == len({item["id"] for item in items}) == ITEMS
    assert all(item["FILE"] for item in items)
