"""The reference of actions: what each route, method, subject and command of the running code needs.

Everything is found in the code itself: applications, methods and commands are made as a server makes them, and asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import typer
from starlette.applications import Starlette

from weir.access.gate import Gate
from weir.access.policy.actions import Action
from weir.bus.naming.permissions import PRODUCER, permissions, permissions_of_broker_user
from weir.bus.naming.subject_actions import action_of_subject
from weir.commands.access.rights import COMMAND_ACTIONS
from weir.commands.app import app as commands
from weir.console.api.app import make_app as make_console_app
from weir.gateway.grpc.server import GrpcServer
from weir.gateway.grpc.weir_service import traffic_methods
from weir.gateway.http.app import make_app
from weir.gateway.http.traffic import traffic_routes
from weir.gateway.metrics.endpoint import MetricsEndpoint
from weir.gateway.platforms.multi_model import MultiModel
from weir.http_server.routing import Route
from weir.telemetry.metrics_config import MetricsConfig


def applications() -> dict[str, Starlette]:
    """Every ASGI application of Weir, by the name of its port."""
    context = MagicMock()
    context.access.http = ()
    context.gate = Gate(lambda: 0.0)
    metrics = MetricsEndpoint("", context, MetricsConfig(), MagicMock(), MagicMock())
    console = MagicMock()
    with tempfile.TemporaryDirectory() as folder:
        sagemaker = MultiModel(context, Path(folder)).app()
    return {
        "HTTP": make_app(context, traffic_routes(MagicMock())),
        "SageMaker": sagemaker,
        "metrics": metrics.app(),
        "console": make_console_app(console, "127.0.0.1"),
    }


def rights_of_routes() -> Iterator[tuple[str, str, Action]]:
    """(port, method and path, action) of each route. Raises TypeError for one that has none."""
    for port, app in applications().items():
        for route in app.routes:
            if not isinstance(route, Route):
                raise TypeError(f"the route {route} of {port} names no action")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield port, f"{method} {route.path}", route.action


def rights_of_methods() -> dict[str, Action]:
    """The action of each gRPC method, by its path."""
    context = MagicMock()
    context.server_id = "weir"
    server = GrpcServer(context, None, traffic_methods(MagicMock()))
    return {path.decode(): method.action for path, method in server.methods.items()}


def rights_of_subjects() -> dict[str, Action | None]:
    """The action of each subject that a client's user may publish to; None where nothing is asked of a model."""
    found = (*permissions()[PRODUCER].publish, *permissions_of_broker_user("*").publish)
    return {subject: action_of_subject(subject) for subject in found}


def rights_of_commands() -> Mapping[str, Action | None]:
    """The action that a user of each command needs; None for one that asks nothing of a server. Raises KeyError."""
    return {name: COMMAND_ACTIONS[name] for name in names_of(typer.main.get_command(commands))}


def names_of(command: Any, name: str = "") -> Iterator[str]:
    """The names of all commands of an application: "dead list"."""
    inner = getattr(command, "commands", None)  # of a group
    if inner is None:
        yield name
        return
    for word, one in inner.items():
        yield from names_of(one, f"{name} {word}".strip())


def tables() -> str:
    """Markdown tables of all of them, by action."""
    found: dict[Action, list[tuple[str, str]]] = {action: [] for action in Action}
    for port, what, action in rights_of_routes():
        found[action].append((port, what))
    for path, action in rights_of_methods().items():
        found[action].append(("gRPC", path.lstrip("/")))
    for subject, of_subject in rights_of_subjects().items():
        if of_subject is not None:
            found[of_subject].append(("NATS", subject))
    for name, of_command in rights_of_commands().items():
        if of_command is not None:
            found[of_command].append(("command", f"weir {name}"))
    parts = []
    for action, rows in found.items():
        lines = [f"| {port} | `{what}` |" for port, what in rows]
        scope = "of a model" if action.is_of_model else "of the server"
        parts.append("\n".join([f"## `{action.value}`, {scope}", "", "| door | what |", "| --- | --- |", *lines]))
    return "\n\n".join(parts)
