"""The options of all commands, in the order of the help text. Each option is declared once."""

from __future__ import annotations

from weir.options.access import ACCESS_POLICY_OPTIONS, REQUEST_LOG_OPTIONS
from weir.options.console import CONSOLE_OPTIONS
from weir.options.deprecated import DEPRECATED
from weir.options.durable import DURABLE_OPTIONS
from weir.options.frontends import FRONTEND_OPTIONS
from weir.options.models import MODEL_OPTIONS
from weir.options.option import BACKENDS, ROLES, SERVE, Option, UsageError
from weir.options.processes import PROCESS_OPTIONS
from weir.options.server import SCALING_OPTIONS, SERVER_OPTIONS
from weir.options.tls import TLS_OPTIONS
from weir.options.unsupported import INEFFECTIVE, REFUSED, REMOVED

OPTIONS: tuple[Option, ...] = (
    *MODEL_OPTIONS,
    *FRONTEND_OPTIONS,
    *CONSOLE_OPTIONS,
    *ACCESS_POLICY_OPTIONS,
    *TLS_OPTIONS,
    *DURABLE_OPTIONS,
    *PROCESS_OPTIONS,
    *SCALING_OPTIONS,
    *SERVER_OPTIONS,
    *REQUEST_LOG_OPTIONS,
    *INEFFECTIVE,
    *REFUSED,
    *REMOVED,
    *DEPRECATED,
)
"""All options, in the order of the help text."""


def options_of(command: str) -> dict[str, Option]:
    """The options that `command` ("serve", or a role) accepts, by key, in the order of the help text."""
    return {option.key: option for option in OPTIONS if command in option.commands}


__all__ = ["BACKENDS", "OPTIONS", "ROLES", "SERVE", "Option", "UsageError", "options_of"]
