"""`Option`: the declaration of one command line option. Commands, settings and docs are generated from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from weir.options.values import BadValue, Switch, Value

SERVE, GATEWAY, DURABLE, SCHEDULER, WORKER = "serve", "gateway", "durable", "scheduler", "worker"
CONSOLE = "console"

BACKENDS = "backends"

ROLES = (GATEWAY, DURABLE, SCHEDULER, WORKER, CONSOLE)
"""The commands that run one role each; `weir serve` starts them."""


class UsageError(Exception):
    """The command line is invalid. The message is one line for the user; the exit status is 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    `names` are its spellings, the canonical one first. `value` parses its text. `default` is a parsed value, or None
    for no default (`shown_default` then describes the behaviour in the help text); repeatable options default to ().
    `bare` is the text assumed when the option is given without a value. `commands` are the commands that accept it, and
    `field` is the field of their settings that holds it; `weir serve` passes its value on to the roles that accept it.
    `environment` names an environment variable that sets it. An option with `ineffective` is accepted, and that reason is
    logged. An option with `refused` accepts only values for which `harmless` is true. `differs` describes how it differs
    from Triton's option of the same name; `ours` marks options that Triton does not have. `is_common` marks those that
    `--help` shows; the others are shown by `--help-all`.
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
    is_common: bool = False

    @property
    def name(self) -> str:
        """The canonical name: "--http-port"."""
        return self.names[0]

    @property
    def key(self) -> str:
        """The name as a Python identifier: "http_port"."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def settings_field(self) -> str:
        """The field of a role's settings that holds its value."""
        return self.field or self.key

    def read(self, text: str) -> Any:
        """Parse `text`. Raises UsageError, in Triton's wording, also for an option that Weir rejects."""
        try:
            value = self.value.read(text)
        except BadValue as error:
            raise UsageError(f'Bad option: "{self.name}". {error}') from error
        if self.refused and not self.harmless(value):
            raise UsageError(f"{self.name}={text} is rejected: {self.refused}")
        return value

    def read_all(self, texts: Iterable[str]) -> tuple[Any, ...]:
        """The values of a repeatable option, in order."""
        return tuple(self.read(text) for text in texts)

    def written(self, value: Any) -> list[str]:
        """`value` as command line arguments; an empty list for None and for an empty tuple."""
        if value is None:
            return []
        values = value if self.repeatable else (value,)
        return [f"{self.name}={self.value.write(one)}" for one in values]


def switch(name: str, default: bool, help: str, **attributes: Any) -> Option:
    """Declare a boolean option, which is true if given without a value. `attributes` are further fields of `Option`."""
    return Option(
        names=(name,),
        value=Switch(),
        default=default,
        bare="true",
        help=help,
        **attributes,
    )
