"""How the text of an option becomes a value, with Triton's spellings and Triton's words for what is not one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_TRUE = ("true", "1", "on")
_FALSE = ("false", "0", "off")


class BadValue(ValueError):
    """The text is no value of the option."""


class Value(Protocol):
    """A kind of values. `metavar` stands for it in the help, and `choices` are all its texts where they are few."""

    choices: Sequence[str]

    @property
    def metavar(self) -> str:
        """What stands for a value in the help."""

    def read(self, text: str) -> Any:
        """The value `text` means. Raises BadValue."""

    def write(self, value: Any) -> str:
        """A text that means `value`."""


class _Plain:
    choices: Sequence[str] = ()

    def write(self, value: Any) -> str:
        """`value` as text."""
        return str(value)


@dataclass(frozen=True)
class Text(_Plain):
    """Any text."""

    metavar: str = "TEXT"

    def read(self, text: str) -> str:
        """`text` itself."""
        return text


@dataclass(frozen=True)
class NotEmpty(_Plain):
    """Any text but none; `complaint` is what is said of that."""

    metavar: str
    complaint: str

    def read(self, text: str) -> str:
        """`text` itself. Raises BadValue."""
        if not text:
            raise BadValue(self.complaint)
        return text


class Switch:
    """A truth value in Triton's spellings, in any case."""

    metavar = "BOOLEAN"
    choices: Sequence[str] = ("true", "false")

    def read(self, text: str) -> bool:
        """The truth value. Raises BadValue."""
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise BadValue(f"invalid value for bool option: {text}. Choose true or false.")

    def write(self, value: bool) -> str:
        """The spelling in use."""
        return "true" if value else "false"


@dataclass(frozen=True)
class Integer(_Plain):
    """A whole number; `complaint` is what is said of one outside the bounds."""

    min: float = -math.inf
    max: float = math.inf
    complaint: str = ""
    metavar: str = "INTEGER"

    def read(self, text: str) -> int:
        """The number. Raises BadValue."""
        try:
            number = int(text)
        except ValueError:
            raise BadValue(f"Invalid option value. Got {text}. It must be a whole number.") from None
        if not self.min <= number <= self.max:
            raise BadValue(
                self.complaint or f"Provided option value is out of bound. Got {text}. {_bounds(self.min, self.max)}"
            )
        return number


@dataclass(frozen=True)
class Number(_Plain):
    """A finite number, at least `min`."""

    min: float = -math.inf
    metavar: str = "NUMBER"

    def read(self, text: str) -> float:
        """The number. Raises BadValue."""
        try:
            number = float(text)
        except ValueError:
            raise BadValue(f"Invalid option value. Got {text}. It must be a number.") from None
        if not math.isfinite(number) or number < self.min:
            raise BadValue(f"Provided option value is out of bound. Got {text}. {_bounds(self.min, math.inf)}")
        return number

    def write(self, value: float) -> str:
        """The shortest text that means it."""
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)


class Verbosity(Integer):
    """A level, or a truth value for 1 and 0."""

    def __init__(self) -> None:
        super().__init__(min=0, metavar="LEVEL")

    def read(self, text: str) -> int:
        """The level. Raises BadValue."""
        return super().read({"true": "1", "false": "0"}.get(text.lower(), text))


class Choice(_Plain):
    """One of some words, or of `aliases` of them; their case counts only where `exact`.

    `complaint` is the error for any other, in Triton's words; the choices are added.
    """

    def __init__(
        self, words: Sequence[str], complaint: str, exact: bool = False, aliases: Mapping[str, str] | None = None
    ) -> None:
        self.metavar = "|".join(words)
        self.choices = tuple(words)
        meanings = {**{word: word for word in words}, **(aliases or {})}
        self._words = {spelling if exact else spelling.lower(): word for spelling, word in meanings.items()}
        self._exact = exact
        self._complaint = complaint

    def read(self, text: str) -> str:
        """The word as it is spelled among the choices. Raises BadValue."""
        word = self._words.get(text if self._exact else text.lower())
        if word is None:
            complaint = self._complaint.format(text=text.lower()).removesuffix(".")
            raise BadValue(f"{complaint}. Choose one of: {', '.join(self.choices)}.")
        return word


@dataclass(frozen=True)
class Checked(_Plain):
    """Text of some form: `check` raises BadValue where it has another."""

    metavar: str
    check: Callable[[str], object]

    def read(self, text: str) -> str:
        """`text` itself. Raises BadValue."""
        self.check(text)
        return text


def _bounds(low: float, high: float) -> str:
    low_text, high_text = (
        str(int(one)) if math.isfinite(one) and one == int(one) else f"{one:g}" for one in (low, high)
    )
    if math.isinf(low):
        return "It must be finite." if math.isinf(high) else f"It must be at most {high_text}."
    return f"It must be at least {low_text}." if math.isinf(high) else f"It must be between {low_text} and {high_text}."
