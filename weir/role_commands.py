"""`weir gateway`, `weir scheduler`, `weir worker`: one role each, as `weir serve` and containers run them.

A role's code is imported only when its command runs. Its `main.run(settings)` blocks until the role has ended; a
WeirError it raises is told in one line, here and to the supervisor.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from bus.broker_access import BrokerAccess
from schemas.errors import WeirError
from telemetry.readiness import announce_failure, watch_parent
from weir.hidden_secrets import forget_secrets
from weir.local_servers import access_to
from weir.options import options_of
from weir.options.broker_options import ACCESS_FIELDS
from weir.preflight import check_backend_directories, check_repositories
from weir.start_error import StartError

HELP = {
    "gateway": "Run one gateway: HTTP, gRPC and metrics in front of the bus.",
    "scheduler": "Run one scheduler: it forms batches and hands them to workers.",
    "worker": "Run one worker: it loads models and executes batches.",
}
"""What each role's command does."""


def run_role(role: str, values: Mapping[str, Any]) -> None:
    """Run `role` with the values of its options, by key, until it ends."""
    settings = settings_of(role, values)
    forget_secrets()
    watch_parent()
    main = _imported(role)
    if "WEIR_PAUSE_POINTS" in os.environ:  # a test has the role stop, or die, at steps of a request's life
        import_module("weir.pause_points").arm(role)
    try:
        status = main.run(settings)
    except WeirError as error:
        logging.getLogger(f"weir.{role}").error("%s", error.message)
        announce_failure(error.message)
        raise typer.Exit(1) from error
    if status:
        raise typer.Exit(status)


def _imported(role: str) -> Any:
    """The role's `main`. What is imported lives for ever, so the garbage collector is not to look through it again."""
    gc.disable()
    main = import_module(f"{role}.main")
    gc.freeze()
    gc.enable()
    return main


def check_gateway_options(values: Mapping[str, Any]) -> None:
    """Raises StartError for options that only a gateway reads, which is started once all models are loaded."""
    options = options_of("gateway")
    chosen = {key: values.get(key, () if option.repeatable else option.default) for key, option in options.items()}
    settings = settings_of("gateway", {**chosen, "nats": chosen["nats"] or "nats://127.0.0.1"})
    try:
        import_module("gateway.parsed_settings").parse_settings(settings)
    except WeirError as error:
        raise StartError(error.message) from error
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from error


def settings_of(role: str, values: Mapping[str, Any]) -> Any:
    """The settings of `role`, a dataclass of its package. Raises StartError for what is missing."""
    fields = {option.settings_field: values[key] for key, option in options_of(role).items()}
    fields["nats_access"] = BrokerAccess.of({name: fields.pop(name) for name in list(fields) if name in ACCESS_FIELDS})
    if fields["nats_url"] is None:
        raise StartError("--nats must be specified")
    fields["nats_access"] = access_to(fields["nats_url"], fields["nats_access"])
    if "model_repositories" in fields and (role != "scheduler" or fields["model_repositories"]):
        # A scheduler does without, and looks into a folder when it needs something of it.
        may_be_absent = role == "scheduler" or fields.get("exit_on_error") is False
        fields["model_repositories"] = check_repositories(fields["model_repositories"], may_be_absent)
        if role == "scheduler":  # what it reads there is code, which never travels over the bus
            fields["model_repositories"] = tuple(p for p in fields["model_repositories"] if isinstance(p, Path))
    if "backend_directories" in fields:
        fields["backend_directories"] = check_backend_directories(fields["backend_directories"])
    if "metrics_address" in fields:
        fields["metrics_address"] = fields["metrics_address"] or fields["http_address"]
        fields["grpc_use_ssl"] = fields["grpc_use_ssl"] or fields["grpc_use_ssl_mutual"]
    kind = getattr(import_module(f"{role}.settings"), f"{role.title()}Settings")
    # An unset field is left to the settings' own default.
    missing = {field.name for field in dataclasses.fields(kind)} - fields.keys()
    assert not missing, f"no option of {role} sets {missing}"  # noqa: S101
    return kind(**fields)
