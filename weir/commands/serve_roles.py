"""The roles of one `weir serve`: their command lines, and how several gateways or workers share what there is once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from weir.commands.preflight import Listener
from weir.options import SERVE, Option, options_of
from weir.options.secret import SecretText, as_variable
from weir.runtime.limits.budgets import memory_for_requests_bytes
from weir.runtime.process_memory import available_memory_bytes, machine_memory_bytes
from weir.supervisor.processes import ProcessCounts, ProcessorShares
from weir.supervisor.role import RoleSpec

# -P: modules in the current folder must not replace Weir's packages.
_WEIR = (sys.executable, "-P", "-m", "weir")
_DRAWN_PORTS = {
    "http_port": "--http-port",
    "grpc_port": "--grpc-port",
    "metrics_port": "--metrics-port",
    "sagemaker_port": "--sagemaker-port",
    "vertex_ai_port": "--vertex-ai-port",
}


def role_command(role: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The command line of `role`, with the shared options that differ from their defaults.

    The broker's URL and secrets are passed in the environment instead (`role_secrets`).
    """
    arguments = [*_WEIR, role]
    for key, option in _shared_options(role).items():
        if values[key] != option.default and not _is_secret(values[key]):
            arguments += option.written(values[key])
    return tuple(arguments)


def role_secrets(role: str, values: Mapping[str, Any]) -> dict[str, str]:
    """The environment that passes the secrets among the options of `role` to it. The role removes it at once."""
    texts = {
        key: [option.value.write(value) for value in _each(values[key])]
        for key, option in _shared_options(role).items()
        if _is_secret(values[key])
    }
    return as_variable(texts)


def _shared_options(role: str) -> dict[str, Option]:
    """The options of `role` that `weir serve` has too, without the broker's URL."""
    ours = options_of(SERVE)
    return {key: option for key, option in options_of(role).items() if key in ours and key != "nats"}


def _is_secret(value: Any) -> bool:
    return any(isinstance(one, SecretText) for one in _each(value))


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def sizes_of_streams(values: Mapping[str, Any], store_bytes: int) -> dict[str, int]:
    """The sizes of the durable streams that are not given, for a nats-server that may store `store_bytes`: by option."""
    from weir.bus.streams import declarations  # late: options are checked before it is imported

    keys = ("queue_max_bytes", "result_max_bytes", "dead_max_bytes")
    sizes = zip(keys, declarations.sizes_of_streams(store_bytes), strict=True)
    return {key: size for key, size in sizes if values[key] is None}


class MemoryShares(NamedTuple):
    """The options of memory, with their values, of gateways, of the process of durable requests, and of all that own
    payloads.
    """

    gateways: dict[str, int]
    durable: dict[str, int]
    payloads: dict[str, int]


def share_memory(values: Mapping[str, Any], counts: ProcessCounts, has_console: bool = False) -> MemoryShares:
    """The memory for requests of each process where the container has a limit, which all of them share.

    A request may be held twice while it is packed, and pages of shared memory count as the container's, whichever process
    has written them. So gateways keep a sixth of what is left beside the processes themselves, the durable process half of
    that, and all payloads together are a quarter of it. What is given holds, and without a limit the roles' defaults do.
    """
    if available_memory_bytes() >= machine_memory_bytes():
        return MemoryShares({}, {}, {})
    from weir.bus.payloads.arena import process_budget  # late: as above
    from weir.gateway.parsed_settings import MIN_LEDGER_BYTES, default_ledger_bytes

    processes = sum(counts) + 3 + has_console  # the durable process, nats-server, and the supervisor
    left_bytes = memory_for_requests_bytes(processes)
    ledger_bytes = max(MIN_LEDGER_BYTES, min(default_ledger_bytes(), left_bytes // 6))
    payload_bytes = left_bytes // 4 // (counts.gateways + counts.workers + 1)
    is_ledger_given, are_payloads_given = values["gateway_memory_byte_size"], values["payload_memory_byte_size"]
    return MemoryShares(
        {} if is_ledger_given else {"gateway_memory_byte_size": ledger_bytes},
        {} if is_ledger_given else {"gateway_memory_byte_size": max(MIN_LEDGER_BYTES, ledger_bytes // 2)},
        {} if are_payloads_given else {"payload_memory_byte_size": min(process_budget().total_bytes, payload_bytes)},
    )


def role_names(role: str, count: int) -> list[str]:
    """The names of `count` processes of a role: its own name, or numbered ones if there are several."""
    return [role] if count == 1 else [f"{role}-{number}" for number in range(count)]


def gateway_roles(values: Mapping[str, Any], count: int, durable_id: str) -> list[RoleSpec]:
    """`count` gateways on the same ports. They share the memory that is for requests of clients.

    The first one selects the ports where they are 0, and serves managed services and the metrics of all: the counters of
    several processes on one metrics port would seem to jump back and forth.
    """
    command = (
        *role_command("gateway", {**values, **_gateway_memory(values, count)}),
        "--durable-consumer=false",
        f"--durable-id={durable_id}",
    )
    if count > 1:
        command += ("--reuse-http-port=true", "--reuse-grpc-port=true")
    names, secrets = role_names("gateway", count), role_secrets("gateway", values)
    return [
        RoleSpec(
            name=name,
            argv=(*command, f"--gateway-number={number}") if number else command,
            environment=secrets,
            start_rank=2 if number else 1,  # models are ready before; a later gateway repeats the first one's ports
            drain_rank=0,
            kept_facts=_DRAWN_PORTS,
            facts_of=names[0] if number else "",
        )
        for number, name in enumerate(names)
    ]


def console_role(values: Mapping[str, Any], listener: Listener) -> RoleSpec:
    """The console, which starts with the gateways, and without which the server runs too."""
    return RoleSpec(
        name="console",
        argv=role_command("console", {**values, "console_port": listener.port}),
        environment=role_secrets("console", values),
        start_rank=1,
        drain_rank=0,
        kept_facts={"console_port": "--console-port"},
        is_optional=True,
    )


def worker_roles(
    values: Mapping[str, Any], gpus: int, count: int, shares: ProcessorShares | None = None
) -> list[RoleSpec]:
    """`count` workers. Each has one GPU, as far as there are several workers and enough GPUs, or all GPUs if it is alone.

    With one process per GPU, a device failure affects only the worker of that GPU. The first worker and those without a
    GPU run the instances that need none.
    """
    shared = _payload_memory(values, count) if count > max(1, gpus) else {}
    command, secrets = role_command("worker", {**values, **shared}), role_secrets("worker", values)
    roles: list[RoleSpec] = []
    for number, name in enumerate(role_names("worker", count)):
        argv, environment = command, secrets
        if count > 1 and number < gpus:
            argv += (f"--gpu={number}",) if number == 0 else (f"--gpu={number}", "--cpu-instances=false")
        elif count > 1 and gpus:
            environment = {**secrets, "CUDA_VISIBLE_DEVICES": ""}
        processors = shares.workers[number] if shares is not None else frozenset()
        roles.append(RoleSpec(name=name, argv=argv, drain_rank=2, environment=environment, processors=processors))
    return roles


def _gateway_memory(values: Mapping[str, Any], count: int) -> dict[str, int]:
    """The limits of memory of each of `count` gateways, as values of options.

    A given limit holds for all gateways together, and so does what the default derives from the memory of the machine.
    """
    if count == 1:
        return {}
    from weir.gateway.parsed_settings import default_ledger_bytes  # late: options are checked before it is imported

    given_bytes = values["gateway_memory_byte_size"]
    return {
        "gateway_memory_byte_size": given_bytes // count if given_bytes else default_ledger_bytes(count),
        **_payload_memory(values, count),
    }


def _payload_memory(values: Mapping[str, Any], count: int) -> dict[str, int]:
    """The shared memory for payloads of each of `count` processes that share what a lone one may use by default."""
    from weir.bus.payloads.arena import process_budget  # late: options are checked before it is imported

    return {"payload_memory_byte_size": values["payload_memory_byte_size"] or process_budget().total_bytes // count}
