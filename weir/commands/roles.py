"""`weir gateway`, `weir durable`, `weir scheduler`, `weir worker`: run one role, as `weir serve` and containers do.

A role's code is imported only when its command runs. Its `main.run(settings)` blocks until the role ends; a WeirError that
it raises is logged and announced to the supervisor in one line. Secrets are hidden from other processes and from the
code of models first.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from weir import API_KEY_VARIABLE, NATS_URL_VARIABLE, OTLP_HEADERS_VARIABLES
from weir.bus.nats.access import PASSWORD_VARIABLE, BrokerAccess
from weir.commands.preflight import check_agent_directory, check_backend_directories, check_repositories
from weir.commands.running_server import access_to
from weir.commands.terminal import examples
from weir.errors import StartError
from weir.options import OPTIONS, options_of
from weir.options.broker import ACCESS_FIELDS, NATS_VALUE
from weir.options.secret import SECRETS_VARIABLE, Secret, has_identity, in_the_clear, without_identities
from weir.runtime.readiness import announce_failure, watch_parent
from weir.schemas.core.errors import WeirError

HELP = {
    "gateway": "Run a gateway: it serves HTTP, gRPC and metrics.",
    "durable": "Run durable requests and offline jobs in a process of their own, beside gateways.",
    "scheduler": "Run a scheduler: it forms batches and assigns them to workers.",
    "worker": "Run a worker: it loads models and executes batches.",
    "console": "Run a console: a web page with the state, the load and the requests of a cluster.",
}
"""The help text of each role's command."""

EXAMPLES = {
    "gateway": examples("weir gateway --nats=nats://broker:4222 --http-address=0.0.0.0"),
    "durable": examples("weir durable --nats=nats://broker:4222 --batch-root=/data"),
    "scheduler": examples("weir scheduler --nats=nats://broker:4222"),
    "worker": examples(
        "weir worker --nats=nats://broker:4222 --model-repository=models",
        "weir worker --nats=nats://broker:4222 --model-repository=nats://models",
    ),
    "console": examples("weir console --nats=nats://broker:4222 --console-address=0.0.0.0"),
}
"""The examples in the help of each role's command."""


def run_role(role: str, values: Mapping[str, Any]) -> None:
    """Run `role` with the values of its options, by key, until it ends."""
    settings = settings_of(role, values)
    forget_secrets(role)
    watch_parent()
    main = import_role(role)
    warn_of_secrets(logging.getLogger(f"weir.{role}"))
    try:
        status = main.run(settings)
    except WeirError as error:
        logging.getLogger(f"weir.{role}").error("%s", error.message)
        announce_failure(error.message)
        raise typer.Exit(1) from error
    if status:
        raise typer.Exit(status)


def import_role(role: str) -> Any:
    """Import the role's `main` module, and build its decoders of messages.

    Modules are never freed, so the garbage collector need not scan them again.
    """
    gc.disable()
    main = import_module(f"weir.{role}.main")
    import_module("weir.schemas.wire.codec").build_decoders()
    gc.freeze()
    gc.enable()
    return main


def check_gateway_options(values: Mapping[str, Any]) -> None:
    """Check the gateway's options early, because it is started only after all models are loaded. Raises StartError."""
    options = options_of("gateway")
    chosen = {key: values.get(key, () if option.repeatable else option.default) for key, option in options.items()}
    settings = settings_of("gateway", {**chosen, "nats": chosen["nats"] or "nats://127.0.0.1"})
    try:
        import_module("weir.gateway.parsed_settings").parse_settings(settings)
    except WeirError as error:
        raise StartError(error.message) from error
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from error


def check_access_policy(path: str) -> None:
    """Check the access policy early, as `check_gateway_options`. Raises StartError with the place of what is wrong."""
    if path:
        import_module("weir.commands.access.check").read_policy(Path(path))


def settings_of(role: str, values: Mapping[str, Any]) -> Any:
    """The settings of `role`, a dataclass of its package. Raises StartError if a required option is missing."""
    fields = {option.settings_field: values[key] for key, option in options_of(role).items() if not option.refused}
    fields["nats_access"] = BrokerAccess.of({name: fields.pop(name) for name in list(fields) if name in ACCESS_FIELDS})
    if fields["nats_url"] is None:
        raise StartError("--nats must be specified")
    fields["nats_access"] = access_to(fields["nats_url"], fields["nats_access"])
    if "model_repositories" in fields and (role != "scheduler" or fields["model_repositories"]):
        # A scheduler does not require a repository.
        may_be_absent = role == "scheduler" or fields.get("exit_on_error") is False
        fields["model_repositories"] = check_repositories(fields["model_repositories"], may_be_absent)
        if role == "scheduler":  # it reads code there, which is never sent over the bus
            fields["model_repositories"] = tuple(p for p in fields["model_repositories"] if isinstance(p, Path))
    if "backend_directories" in fields:
        fields["backend_directories"] = check_backend_directories(fields["backend_directories"])
    if "repoagent_directory" in fields:
        fields["repoagent_directory"] = check_agent_directory(fields["repoagent_directory"])
    if "metrics_address" in fields:
        for name in ("metrics_address", "sagemaker_address", "vertex_ai_address"):
            fields[name] = fields[name] or fields["http_address"]
        fields["grpc_use_ssl"] = fields["grpc_use_ssl"] or fields["grpc_use_ssl_mutual"]
    kind = getattr(import_module(f"weir.{role}.settings"), f"{role.title()}Settings")
    # Every field has an option.
    missing = {field.name for field in dataclasses.fields(kind)} - fields.keys()
    assert not missing, f"no option of {role} sets {missing}"  # noqa: S101
    return kind(**fields)


_SECRETS = {name: option.value for option in OPTIONS for name in option.names if isinstance(option.value, Secret)}
_SENDS_TRACES = ("gateway", "durable")


def hide_secrets() -> None:
    """Remove secrets from this process's command line and environment as shown in /proc.

    Every user of the host can read the command line there, and every process of the same user the environment.
    Source: Linux's proc(5), `cmdline` and `environ`.
    """
    in_arguments = [text for texts in in_the_clear(sys.argv, _SECRETS).values() for text in texts]
    if _secret_variables() or in_arguments or any(map(has_identity, (*sys.orig_argv, *sys.argv))):
        from setproctitle import getproctitle, setproctitle  # it overwrites both in place

        title = getproctitle()
        for text in in_arguments:
            title = title.replace(text, without_identities(text) if has_identity(text) else "***")
        setproctitle(without_identities(title))


def forget_secrets(role: str = "") -> None:
    """Remove secrets from `os.environ`, in a role that has read its options. Roles that send traces keep their headers."""
    for name in _secret_variables():
        if not (name in OTLP_HEADERS_VARIABLES and role in _SENDS_TRACES):
            del os.environ[name]


def warn_of_secrets(logger: logging.Logger) -> None:
    """Log a warning for each option with a secret on this process's command line."""
    for name in in_the_clear(sys.argv, _SECRETS):
        logger.warning(
            "%s has a secret on the command line, where every user of this machine could read it until the process hid it; "
            "write it to a file that only you may read, and give %s=@FILE",
            name,
            name,
        )


def _secret_variables() -> list[str]:
    always = (PASSWORD_VARIABLE, API_KEY_VARIABLE, SECRETS_VARIABLE, *OTLP_HEADERS_VARIABLES)
    has_user = NATS_VALUE.is_secret(os.environ.get(NATS_URL_VARIABLE, ""))
    return [*(name for name in always if name in os.environ), *([NATS_URL_VARIABLE] if has_user else [])]
