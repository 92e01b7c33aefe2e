"""Finds speech in several streams of sound at once, through model `silero_vad`.

Each stream is a sequence. Its chunks are sent one after another over a gRPC stream of its own, and the server keeps the
state of the network between them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from tritonclient import grpc
from tritonclient.grpc.aio import InferenceServerClient

from weir.demo.speech import RATE_HZ, speech

MODEL = "silero_vad"
CHUNK = 512
"""Samples: 32 ms."""
SPEECH = 0.5
"""A chunk is taken for speech from this probability on."""

SECONDS = 4.0
_SENTENCES = (
    "aI no a lou dam wil even a waild rIv@r nau",
    "wi ar lIv@n Ina vAli wIDa rIv@r",
    "wi wer ol @lon aI no",
    "@ wIr wIl iv@n @ rIv@r",
)
_LEVELS = "▁▂▃▄▅▆▇█"


async def listen(url: str, sounds: Mapping[str, np.ndarray], real_time: bool = False) -> dict[str, np.ndarray]:
    """The probability of speech in each chunk of each sound; all are streamed at the same time."""
    async with InferenceServerClient(url) as client:
        heard = await asyncio.gather(*(_listen_to(client, sound, real_time) for sound in sounds.values()))
    return dict(zip(sounds, heard, strict=True))


async def _listen_to(client: InferenceServerClient, sound: np.ndarray, real_time: bool) -> np.ndarray:
    probabilities = []
    async for result, error in client.stream_infer(_requests(chunks(sound), real_time)):
        if error is not None:
            raise error
        probabilities.append(result.as_numpy("PROB").item())
    return np.array(probabilities)


async def _requests(rows: np.ndarray, real_time: bool) -> AsyncIterator[dict[str, Any]]:
    sequence_id = secrets.randbits(63) + 1
    for number, row in enumerate(rows):
        if real_time:
            await asyncio.sleep(CHUNK / RATE_HZ)
        audio = grpc.InferInput("AUDIO", [1, CHUNK], "FP32")
        audio.set_data_from_numpy(row[None])
        yield {
            "model_name": MODEL,
            "inputs": [audio],
            "sequence_id": sequence_id,
            "sequence_start": number == 0,
            "sequence_end": number == len(rows) - 1,
        }


def chunks(sound: np.ndarray) -> np.ndarray:
    """fp32 [n, 512]: the sound in pieces, with silence behind its end."""
    count = -(-len(sound) // CHUNK)
    rows: np.ndarray = np.pad(sound, (0, count * CHUNK - len(sound))).astype(np.float32).reshape(count, CHUNK)
    return rows


def streams_table(heard: Mapping[str, np.ndarray], seconds: float, columns: int = 32) -> Table:
    """A line for each stream: how much of it is speech, and when."""
    total = sum(map(len, heard.values()))
    title = f"Speech in {len(heard)} streams of sound, heard at once: {total} chunks in {seconds:.1f} s"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("stream", "seconds", "speech", "when"):
        table.add_column(column, justify="right" if column in ("seconds", "speech") else "left")
    for name, probabilities in heard.items():
        table.add_row(
            name,
            f"{len(probabilities) * CHUNK / RATE_HZ:.1f}",
            f"{(probabilities >= SPEECH).mean():.0%}",
            "".join(
                _LEVELS[int(part.mean() * (len(_LEVELS) - 1) + 0.5)]
                for part in np.array_split(probabilities, min(columns, len(probabilities)))
            ),
        )
    return table


def synthesised(seconds: float = SECONDS) -> dict[str, np.ndarray]:
    """Eight sounds by name, fp32 samples at 16 kHz: speech, sounds that are none, and mixtures."""
    length = int(seconds * RATE_HZ)
    at = np.arange(length) / RATE_HZ
    noise = np.random.default_rng(7).normal(0, 1, length)
    low, high, quick, other = (
        np.resize(speech(sentence, pitch, mouth), length)
        for sentence, pitch, mouth in zip(_SENTENCES, (105, 200, 150, 125), (1.0, 1.15, 1.05, 0.97), strict=True)
    )
    sounds = {
        "low voice": low,
        "high voice": high,
        "voice in noise": quick + 0.008 * noise,
        "voice, then silence": np.where(at < seconds / 2, other, 0),
        "silence": np.zeros(length),
        "noise": 0.1 * noise,
        "tone": 0.4 * np.sin(2 * np.pi * 440 * at),
        "chord": sum(0.2 * np.sin(2 * np.pi * hertz * at) for hertz in (262, 330, 392)),
    }
    return {name: np.asarray(sound, np.float32) for name, sound in sounds.items()}
