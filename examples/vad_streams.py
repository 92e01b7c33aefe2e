"""Find speech in several streams of sound at once, with model `silero_vad`.

    python -m examples.vad_streams [--url=localhost:8001] [recording.wav ...]

Without recordings, the sounds are synthesised. The requests are in weir/demo/sound.py.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import wave
from pathlib import Path

import numpy as np
from rich.console import Console

from weir.demo.sound import listen, streams_table, synthesised
from weir.demo.speech import RATE_HZ


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
