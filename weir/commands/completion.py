"""`complete_model`: shell completion of model names, for every argument and option that takes a model.

The names come from a running server, which is selected as the command itself would select it: by `--url`, `--nats` or
`--data-dir` before the cursor, else the only `weir serve` on this machine, else the default address. A gateway is asked
over HTTP; where only a broker is known, its registry is read. Completion offers nothing if no server replies in time: a
shell has no place for an error message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from weir.bus.nats.access import BrokerAccess
from weir.commands.running_server import DEFAULT_HTTP, URL_VARIABLE, BrokerTarget, access_to, only_local_server
from weir.errors import StartError
from weir.options.broker import NATS_OPTION
from weir.options.option import UsageError

TIMEOUT_S = 1.0
"""Longest wait for a server in seconds; a shell does nothing else meanwhile."""

_BROKER_SCHEMES = ("nats://", "tls://")

_OFFERED = re.compile(r"\w[\w.+@-]*")
"""Names that every shell takes literally. Scripts of shells evaluate what they are given, so no other name is offered."""


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """The models of the running server whose names begin with `incomplete`, sorted; [] if no server replies in time.

    For `autocompletion=` of typer's arguments and options. The command's parameters `url`, `nats` and `data_dir`, where it
    has them, select the server.
    """
    return matching(_model_names(ctx.params), incomplete)


def matching(names: Iterable[str], incomplete: str) -> list[str]:
    """The `names` that begin with `incomplete`, sorted and each once, without those that a shell may not take literally."""
    return sorted({name for name in names if name.startswith(incomplete) and _OFFERED.fullmatch(name)})


def _model_names(parameters: Mapping[str, Any]) -> list[str]:
    """The models of the server that the command's parameters select; [] if it does not reply."""
    data_dir: Path | None = parameters.get("data_dir")
    try:
        # `weir perf` has --url for gateways and brokers, so it is not bound to the variable there.
        gateway = parameters.get("url") or ("url" in parameters and os.environ.get(URL_VARIABLE))
        if data_dir is None and (url := gateway or parameters.get("nats")):
            is_broker = not gateway or url.startswith(_BROKER_SCHEMES)
            if not is_broker:
                return _names_over_http(url)
            url = NATS_OPTION.read(url)
            return _names_in_registry(BrokerTarget(url, access_to(url, BrokerAccess.of(parameters))))
        server = only_local_server(data_dir, "")
        if server is not None and not server.http:
            return _names_in_registry(BrokerTarget(server.nats_url, server.access(BrokerAccess.of(parameters))))
        return _names_over_http(server.http_place if server is not None else DEFAULT_HTTP)
    except (StartError, UsageError, OSError, ValueError):
        return []


def _names_over_http(url: str) -> list[str]:
    """The names in the repository index of a gateway. Raises StartError, or OSError if it can't be reached."""
    # Imported here because every command imports this module.
    from weir.commands.gateway_client import GatewayClient, Unreachable

    client = GatewayClient(url, timeout_s=TIMEOUT_S)
    client.show_key("")
    try:
        rows = client.request_json("POST", "/v2/repository/index", {})
    except Unreachable as error:
        raise OSError(str(error)) from error
    return [str(row["name"]) for row in rows if isinstance(row, dict) and "name" in row]


def _names_in_registry(broker: BrokerTarget) -> list[str]:
    """The names of the models that workers have registered. Raises OSError."""
    import asyncio
    import logging

    from nats.errors import Error as NatsError
    from nats.js.errors import NotFoundError

    from weir.bus.kv.registry import RegistryView
    from weir.bus.naming.identity import new_id
    from weir.commands.running_server import unwrap_exception_groups
    from weir.schemas.core.names import plain_name

    async def read() -> list[str]:
        async with (
            asyncio.timeout(TIMEOUT_S),
            asyncio.TaskGroup() as background,
            broker.connected(new_id("completion"), TIMEOUT_S) as bus,
        ):
            registry = RegistryView(bus)
            try:
                await registry.start(background)
            except NotFoundError:  # no worker has registered yet
                return []
            return [plain_name(model) for view in registry.workers.values() for model in view.models]

    logging.getLogger("weir").setLevel(logging.CRITICAL)
    try:
        with unwrap_exception_groups(NatsError, OSError):
            return asyncio.run(read())
    except NatsError as error:
        raise OSError(str(error)) from error
