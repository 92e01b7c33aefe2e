"""Speech that is synthesised with numpy alone, for the speech detector.

A voice is a sum of harmonics of its pitch, shaped by the resonances of the mouth (formants), and hiss. Both glide from
one sound of the language to the next. With some good will it can be understood.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RATE_HZ = 16_000
HIGHEST_HZ = 7_500
UPPER_FORMANTS = ((3_500, 250), (4_500, 300))
"""(frequency, bandwidth) in Hz of those that are the same for all sounds."""
BANDWIDTHS_HZ = (70, 100, 150)


class Phone(NamedTuple):
    """One sound of a language: loudness of voice and hiss, three formants in Hz, and how long it lasts."""

    voice: float
    hiss: float
    formants_hz: tuple[int, int, int]
    ms: int


PHONES = {
    "i": Phone(1, 0, (280, 2250, 2900), 110),
    "I": Phone(1, 0, (400, 1990, 2550), 90),
    "e": Phone(1, 0, (530, 1840, 2480), 110),
    "a": Phone(1, 0, (730, 1090, 2440), 130),
    "A": Phone(1, 0, (660, 1720, 2410), 130),
    "o": Phone(1, 0, (570, 840, 2410), 130),
    "u": Phone(1, 0, (300, 870, 2240), 110),
    "@": Phone(1, 0, (500, 1500, 2500), 70),
    "r": Phone(0.7, 0, (310, 1060, 1380), 70),
    "l": Phone(0.6, 0, (360, 1100, 2600), 70),
    "w": Phone(0.6, 0, (290, 610, 2150), 60),
    "y": Phone(0.6, 0, (260, 2070, 3020), 60),
    "m": Phone(0.4, 0, (250, 1000, 2200), 70),
    "n": Phone(0.4, 0, (250, 1500, 2400), 70),
    "v": Phone(0.3, 0.05, (250, 1200, 2300), 60),
    "D": Phone(0.3, 0.05, (300, 1400, 2600), 50),
    "z": Phone(0.3, 0.15, (4500, 5500, 6500), 80),
    "s": Phone(0, 0.25, (4500, 5500, 6500), 100),
    "d": Phone(0.1, 0, (250, 1700, 2600), 60),
    "b": Phone(0.1, 0, (250, 900, 2100), 60),
    "t": Phone(0, 0.02, (2500, 4000, 5000), 70),
    " ": Phone(0, 0, (500, 1500, 2500), 60),
}
"""By the letter that stands for it in a text."""


def speech(text: str, pitch_hz: float, mouth: float = 1.0, seed: int = 0) -> np.ndarray:
    """fp32 samples in -0.5 .. 0.5 of `text`, a letter of PHONES for each sound; `mouth` below 1 is a longer one."""
    phones = [PHONES[letter] for letter in text]
    lengths = np.array([phone.ms for phone in phones]) * RATE_HZ // 1000
    middles = np.cumsum(lengths) - lengths / 2
    samples = np.arange(lengths.sum())

    def gliding(values: list[float]) -> np.ndarray:
        return np.asarray(np.interp(samples, middles, values))

    formants = [gliding([phone.formants_hz[number] * mouth for phone in phones]) for number in range(3)]
    random = np.random.default_rng(seed)
    pitch = pitch_hz * (1.15 - 0.3 * samples / len(samples) + 0.06 * np.sin(2 * np.pi * 3.1 * samples / RATE_HZ))
    voice = _harmonics(pitch, formants, mouth)
    hiss = _hiss(formants[:2], random)
    sound = gliding([phone.voice for phone in phones]) * voice / np.abs(voice).max()
    sound += gliding([phone.hiss for phone in phones]) * hiss / np.abs(hiss).max()
    return np.asarray(0.5 * sound / np.abs(sound).max(), np.float32)


def _harmonics(pitch_hz: np.ndarray, formants_hz: list[np.ndarray], mouth: float) -> np.ndarray:
    """Each harmonic as loud as the resonances make it where it is at the moment."""
    phase = 2 * np.pi * np.cumsum(pitch_hz) / RATE_HZ
    resonances: list[tuple[np.ndarray | float, int]] = [
        *zip(formants_hz, BANDWIDTHS_HZ, strict=True),
        *((frequency * mouth, bandwidth) for frequency, bandwidth in UPPER_FORMANTS),
    ]
    total = np.zeros(len(pitch_hz))
    for number in range(1, int(HIGHEST_HZ / pitch_hz.min()) + 1):
        frequency = number * pitch_hz
        gain = np.where(frequency < HIGHEST_HZ, 1 / number, 0)
        for formant, bandwidth in resonances:
            gain = gain * formant**2 / np.hypot(formant**2 - frequency**2, bandwidth * frequency)
        total += gain * np.sin(number * phase)
    return total


def _hiss(formants_hz: list[np.ndarray], random: np.random.Generator) -> np.ndarray:
    """Noise around the given frequencies, over a little of all."""
    smooth = np.hanning(32) / np.sqrt(32)
    length = len(formants_hz[0])
    total = 0.3 * random.normal(size=length)
    for formant in formants_hz:
        narrow = np.convolve(random.normal(size=length), smooth, "same")
        total += narrow * np.cos(2 * np.pi * np.cumsum(formant) / RATE_HZ)
    return total
