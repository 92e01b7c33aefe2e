"""`Option`: all that is known of one option of the command line, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from weir.options.values import BadValue, Switch, Value

SERVE, GATEWAY, SCHEDULER, WORKER = "serve", "gateway", "scheduler", "worker"

BACKENDS = "backends"

ROLES = (GATEWAY, SCHEDULER, WORKER)
"""The commands that `weir serve` starts."""


class UsageError(Exception):
    """The command line is wrong; the message is one line for whoever typed it, and the exit status 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    `names` begin with the one it is known by. `value` reads its text. `default` is a read value, None where there is
    none (`shown_default` then tells what happens instead); repeatable options have no other default than none at all.
    `bare` is the text that is meant when the option stands without one. `commands` take it, and it becomes the field
    `field` of their settings; what `weir serve` was given it passes on to the roles among them. `environment` names a
    variable that may give it instead. An option with a reason in `ineffective` is accepted, and the log tells that
    reason. One with a reason in `refused` may only have a value for which `harmless` is true. `differs` tells in what
    it is other than Triton's option of that name; `ours` are those that Triton does not have.
    """

    names: tuple[str, ...]
    value: Value
    help: str
    panel: str
    commands: tuple[str, ...] = (SERVE,)
    default: Any = None
    shown_default: str | None = None
    repeatable: bool = False
    bare: str | None = None
    field: str = ""
    environment: str | None = None
    ineffective: str = ""
    refused: str = ""
    harmless: Callable[[Any], bool] = lambda value: False
    differs: str = ""
    ours: bool = False

    @property
    def name(self) -> str:
        """The name it is known by: "--http-port"."""
        return self.names[0]

    @property
    def key(self) -> str:
        """The name as an identifier of Python: "http_port"."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def settings_field(self) -> str:
        """The field of a role's settings that it becomes."""
        return self.field or self.key

    def read(self, text: str) -> Any:
        """The value that `text` means. Raises UsageError in Triton's words, also where Weir refuses the option."""
        try:
            value = self.value.read(text)
        except BadValue as error:
            raise UsageError(f'Bad option: "{self.name}". {error}') from error
        if self.refused and not self.harmless(value):
            raise UsageError(f"{self.name}={text} is refused: {self.refused}")
        return value

    def read_all(self, texts: Iterable[str]) -> tuple[Any, ...]:
        """The values of a repeatable option, in order."""
        return tuple(self.read(text) for text in texts)

    def written(self, value: Any) -> list[str]:
        """`value` as words of a command line; none for None and for an empty tuple."""
        if value is None:
            return []
        values = value if self.repeatable else (value,)
        return [f"{self.name}={self.value.write(one)}" for one in values]


def switch(
    name: str, default: bool, help: str, panel: str, commands: tuple[str, ...], differs: str = "", ours: bool = False
) -> Option:
    """A truth value, off or on by default, which is on where it stands bare."""
    return Option(
        names=(name,),
        value=Switch(),
        default=default,
        bare="true",
        help=help,
        panel=panel,
        commands=commands,
        differs=differs,
        ours=ours,
    )
