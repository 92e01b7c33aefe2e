"""The options of all commands, each declared once: here they are gathered, in the order of the help."""

from __future__ import annotations

from weir.options.deprecated import DEPRECATED
from weir.options.door_options import DOOR_OPTIONS
from weir.options.durable_options import DURABLE_OPTIONS
from weir.options.ineffective import INEFFECTIVE
from weir.options.model_options import MODEL_OPTIONS
from weir.options.option import BACKENDS, ROLES, SERVE, Option, UsageError
from weir.options.refused import REFUSED
from weir.options.scaling_options import SCALING_OPTIONS
from weir.options.server_options import SERVER_OPTIONS

OPTIONS: tuple[Option, ...] = (
    *MODEL_OPTIONS,
    *DOOR_OPTIONS,
    *DURABLE_OPTIONS,
    *SCALING_OPTIONS,
    *SERVER_OPTIONS,
    *INEFFECTIVE,
    *REFUSED,
    *DEPRECATED,
)
"""Every option there is."""


def options_of(command: str) -> dict[str, Option]:
    """The options that `command` ("serve", or a role) takes, by key, in the order of the help."""
    return {option.key: option for option in OPTIONS if command in option.commands}


__all__ = ["BACKENDS", "OPTIONS", "ROLES", "SERVE", "Option", "UsageError", "options_of"]
