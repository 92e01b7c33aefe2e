"""Parsers of option values, with Triton's spellings and error messages, and checks of structured texts.

The checks import Weir's other packages when they run, which is in Weir's own processes only, so that
a program's start does not wait for them. Source: `command_line_parser.cc` of Triton's server. A checked text is
passed on unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

_TRUE = ("true", "1", "on")
_FALSE = ("false", "0", "off")


class BadValue(ValueError):
    """The text is not a valid value of the option."""


class Value(Protocol):
    """A type of option values. `metavar` names it in the help text; `choices` lists its texts if they are few."""

    choices: Sequence[str]

    @property
    def metavar(self) -> str:
        """The placeholder of a value in the help text."""

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
    """Any text that is not empty; `complaint` is the error for the empty text."""

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
        """The text `true` or `false`."""
        return "true" if value else "false"


@dataclass(frozen=True)
class Integer(_Plain):
    """An integer; `complaint` is the error for one outside the bounds."""

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


AUTO = "auto"
"""The value of a count that Weir chooses itself."""


class IntegerOrAuto(Integer):
    """An integer, or `AUTO`."""

    choices: Sequence[str] = (AUTO,)

    def __init__(self, min: int, max: int) -> None:
        super().__init__(min=min, max=max, metavar=f"COUNT|{AUTO}")

    def read(self, text: str) -> Any:
        """The number, or `AUTO`. Raises BadValue."""
        if text.lower() == AUTO:
            return AUTO
        try:
            return super().read(text)
        except BadValue as error:
            raise BadValue(str(error).removesuffix(".") + f", or {AUTO}.") from None


@dataclass(frozen=True)
class PortRange(_Plain):
    """Two ports, the lowest and the highest one: `8081-9000`."""

    metavar: str = "PORT-PORT"

    def read(self, text: str) -> tuple[int, int]:
        """The two ports. Raises BadValue."""
        first, dash, last = text.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal()):
            raise BadValue(
                "Cannot parse pair option due to incorrect number of inputs.--<pair option> argument requires format "
                f"<first>-<second>. Found: {text}"
            )
        if not int(first) <= int(last) <= 65535:
            raise BadValue(f"Provided option value is out of bound. Got {text}. It must be 0-65535 or a part of that.")
        return int(first), int(last)

    def write(self, value: tuple[int, int]) -> str:
        """`8081-9000`."""
        return f"{value[0]}-{value[1]}"


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
    """One of a set of words, or an alias of one; case-insensitive unless `exact`.

    `complaint` is the error for any other text, in Triton's wording; the choices are appended to it.
    """

    def __init__(
        self, words: Sequence[str], complaint: str, exact: bool = False, aliases: Mapping[str, str] | None = None
    ) -> None:
        self.metavar = "|".join(words)
        self.choices = tuple(words)
        meanings = {**{word: word for word in words}, **(aliases or {})}
        self._arguments = {spelling if exact else spelling.lower(): word for spelling, word in meanings.items()}
        self._exact = exact
        self._complaint = complaint

    def read(self, text: str) -> str:
        """The matching choice in its declared spelling. Raises BadValue."""
        word = self._arguments.get(text if self._exact else text.lower())
        if word is None:
            complaint = self._complaint.format(text=text.lower()).removesuffix(".")
            raise BadValue(f"{complaint}. Choose one of: {', '.join(self.choices)}.")
        return word


@dataclass(frozen=True)
class Checked(_Plain):
    """Text of a given form: `check` raises BadValue for any other."""

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


def setting_of(option: str, what: str) -> Callable[[str], None]:
    """Return a check for `<what>,<setting>=<value>`, which requires all three parts."""

    def check(text: str) -> None:
        owner, comma, setting = text.partition(",")
        key, equals, value = setting.partition("=")
        if not (owner and comma and key and equals and value):
            raise BadValue(f"--{option} option format is '<{what}>,<setting>=<value>'. Got {text}")

    return check


def backend_setting(text: str) -> None:
    """`<backend name>,<setting>=<value>`, or `<setting>=<value>` for all backends."""
    from weir.worker.backends.settings import BackendSettings

    try:
        BackendSettings([text])
    except ValueError as error:
        raise BadValue(str(error)) from error


def host_policy(text: str) -> None:
    """`<policy name>,<setting>=<value>` with a supported setting."""
    setting_of("host-policy", "policy name")(text)
    setting = text.partition(",")[2].partition("=")[0]
    if setting not in ("numa-node", "cpu-cores"):
        raise BadValue(
            f"Unsupported host policy setting '{setting}' is specified, supported settings are 'numa-node', 'cpu-cores'"
        )


def cache_setting(text: str) -> None:
    """`<cache name>,<setting>=<value>`."""
    if text.find(",") <= 0:
        raise BadValue(
            f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got {text}"
        )
    setting_of("cache-config", "cache name")(text)


def listen_address(text: str) -> None:
    """`<host>` or `<host>:<port>`."""
    from weir.schemas.core.names import ListenAddress

    try:
        ListenAddress.of(text)
    except ValueError as error:
        raise BadValue(str(error)) from error


def device_pair(text: str) -> None:
    """`<device>:<number>`."""
    device, colon, number = text.partition(":")
    if not colon:
        raise BadValue(
            "Cannot parse pair option due to incorrect number of inputs."
            f"--<pair option> argument requires format <first>:<second>. Found: {text}"
        )
    Integer().read(device)
    Number().read(number)


def rate_limit_resource(text: str) -> None:
    """`<resource_name>:<count>:<device>` or `<resource_name>:<count>`."""
    _, *numbers = text.split(":")
    if not 1 <= len(numbers) <= 2:
        raise BadValue(
            "--rate-limit-resource option format is "
            f"'<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got {text}"
        )
    for number in numbers:
        Integer().read(number)


def worker_resource(text: str) -> None:
    """`<name>=<count>`."""
    from weir.schemas.config.parameters import read_resource

    try:
        read_resource(text)
    except ValueError as error:
        raise BadValue(f"--worker-resource option format is '<name>=<count>'. Got {text}: {error}") from error


def tenant_weight(text: str) -> None:
    """`<tenant>=<weight>`, a number above 0."""
    tenant, equals, weight = text.rpartition("=")
    if not (tenant and equals and Number().read(weight) > 0):
        raise BadValue(f"--tenant-weight option format is '<tenant>=<weight>'. Got {text}")


def tenant_limit(text: str) -> None:
    """`<tenant>=<count>`, at least 1."""
    tenant, equals, count = text.rpartition("=")
    if not (tenant and equals and Integer().read(count) > 0):
        raise BadValue(f"--tenant-limit option format is '<tenant>=<count>'. Got {text}")


def callback_prefix(text: str) -> None:
    """A URL prefix with scheme http or https, host and path."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.path.startswith("/"):
        raise BadValue(f"--callback-allow option format is 'http[s]://<host>[:<port>]/<path>'. Got {text}")
