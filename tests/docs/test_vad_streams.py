"""Speech is separated from silence, with the results of the network as published."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from examples.vad_streams import read_wav, write_wav
from tests.support.servers.demo import Served, environment
from weir.demo.networks import package_folder
from weir.demo.silero_graph import CONTEXT, RATE_HZ, SAMPLES, STATE, as_sequence_model
from weir.demo.sound import SPEECH, chunks, listen, synthesised

NETWORK = package_folder("silero_vad") / "data" / "silero_vad_op18_ifless.onnx"
CLOSE = 1e-4


def session(network: Path | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(network, options)


@pytest.fixture(scope="module")
def sounds() -> dict[str, np.ndarray]:
    return synthesised()


@pytest.fixture(scope="module")
def expected(sounds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the network says when it is asked as its package asks it: one stream, state and context kept by the caller."""
    network = session(NETWORK)

    def probabilities(sound: np.ndarray) -> np.ndarray:
        state, context = np.zeros((2, 1, 128), np.float32), np.zeros((1, CONTEXT), np.float32)
        said = []
        for row in chunks(sound):
            received = np.concatenate([context, row[None]], axis=1)
            probability, state = network.run(None, {"input": received, "state": state, "sr": np.array(RATE_HZ)})
            context = received[:, -CONTEXT:]
            said.append(probability.item())
        return np.array(said)

    return {name: probabilities(sound) for name, sound in sounds.items()}


def test_the_wrapped_network_says_the_same_in_batches_whatever_the_state_held_before(
    sounds: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    model = session(as_sequence_model(onnx.load(NETWORK)).SerializeToString())
    rows = np.stack([chunks(sound) for sound in sounds.values()])
    state = np.full((len(rows), *STATE), np.nan, np.float32)
    context = np.full((len(rows), CONTEXT), np.nan, np.float32)
    said = []
    for number in range(rows.shape[1]):
        probability, state, context = model.run(
            ["PROB", "STATE_OUT", "CONTEXT_OUT"],
            {
                "AUDIO": rows[:, number],
                "START": np.full((len(rows), 1), number == 0),
                "STATE_IN": state,
                "CONTEXT_IN": context,
            },
        )
        said.append(probability[:, 0])
    np.testing.assert_allclose(np.array(said).T, list(expected.values()), atol=CLOSE)


def test_speech_is_heard_in_voices_alone(expected: dict[str, np.ndarray]) -> None:
    shares = {name: (probabilities >= SPEECH).mean() for name, probabilities in expected.items()}
    assert all(shares[name] > 0.9 for name in ("low voice", "high voice", "voice in noise"))
    assert 0.4 < shares["voice, then silence"] < 0.6
    assert all(shares[name] == 0 for name in ("silence", "noise", "tone", "chord"))


def test_streams_that_are_served_at_once_get_their_own_answers(
    served: Served, sounds: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    received = asyncio.run(listen(served.here("localhost:8001"), sounds))
    assert received.keys() == expected.keys()
    for name, probabilities in received.items():
        np.testing.assert_allclose(probabilities, expected[name], atol=CLOSE, err_msg=name)


def test_a_recording_is_streamed(served: Served, tmp_path: Path, sounds: dict[str, np.ndarray]) -> None:
    write_wav(tmp_path / "voice.wav", sounds["low voice"])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "examples.vad_streams",
            served.here("--url=localhost:8001"),
            str(tmp_path / "voice.wav"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (row,) = (line.split() for line in done.stdout.splitlines() if "voice.wav" in line)
    assert row[1] == "4.0"
    assert int(row[2].removesuffix("%")) > 90


def test_recordings_are_brought_to_the_rate_of_the_network(tmp_path: Path) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(RATE_HZ) / RATE_HZ).astype(np.float32)
    write_wav(tmp_path / "tone.wav", tone)
    np.testing.assert_allclose(read_wav(tmp_path / "tone.wav"), tone, atol=1e-4)
    header = bytearray((tmp_path / "tone.wav").read_bytes())
    header[24:28] = (2 * RATE_HZ).to_bytes(4, "little")  # the same samples, said to be twice as fast
    (tmp_path / "fast.wav").write_bytes(header)
    np.testing.assert_allclose(read_wav(tmp_path / "fast.wav"), tone[::2], atol=1e-4)


def test_the_last_chunk_is_filled_with_silence() -> None:
    rows = chunks(np.ones(SAMPLES + 1, np.float32))
    assert rows.shape == (2, SAMPLES)
    assert rows.sum() == SAMPLES + 1
