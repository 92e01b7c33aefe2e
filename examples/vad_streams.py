"""Listen to several streams of sound at once, and tell when somebody speaks: model `silero_vad`.

    python -m examples.vad_streams [--url=localhost:8001] [recording.wav ...]

Each stream is a sequence. Its chunks are sent one after another over a gRPC stream of its own, and the server keeps what
the network remembers of it. Without recordings, the sounds are synthesised.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
import wave
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tritonclient import grpc
from tritonclient.grpc.aio import InferenceServerClient

from examples.speech import RATE_HZ, speech

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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path, help="wav files with 16 bits a sample")
    parser.add_argument("--url", default="localhost:8001", help="where the server speaks gRPC")
    parser.add_argument("--real-time", action="store_true", help="send as fast as sound comes from a microphone")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the synthesised sounds there, to be heard")
    arguments = parser.parse_args()
    sounds = {path.name: read_wav(path) for path in arguments.recordings} or synthesised()
    if arguments.keep is not None:
        for name, sound in sounds.items():
            write_wav(arguments.keep / f"{name}.wav", sound)
    began = time.perf_counter()
    heard = asyncio.run(listen(arguments.url, sounds, arguments.real_time))
    Console(highlight=False).print(streams_table(heard, time.perf_counter() - began))


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


def read_wav(path: Path) -> np.ndarray:
    """fp32 samples at 16 kHz of a file with 16 bits a sample; of several channels the first."""
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise SystemExit(f"{path} does not have 16 bits a sample")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")[:: file.getnchannels()] / 32768
        rate = file.getframerate()
    at = np.arange(int(len(samples) * RATE_HZ / rate)) * rate / RATE_HZ
    return np.interp(at, np.arange(len(samples)), samples).astype(np.float32)


def write_wav(path: Path, sound: np.ndarray) -> None:
    """The sound as a file that any player plays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    main()
