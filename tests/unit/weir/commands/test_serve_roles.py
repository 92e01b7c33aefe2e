"""The roles that `weir serve` starts: how many, with which devices, ports and shares of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weir.bus.payloads.arena import process_budget
from weir.commands import serve_roles
from weir.commands.serve_roles import gateway_roles, role_names, share_memory, sizes_of_streams, worker_roles
from weir.gateway.parsed_settings import default_ledger_bytes
from weir.options import SERVE, options_of
from weir.options.secret import taken_from
from weir.runtime.limits import budgets
from weir.runtime.limits.budgets import PROCESS_BYTES
from weir.supervisor.processes import ProcessCounts, ProcessorShares
from weir.supervisor.role import RoleSpec

VALUES = {key: () if option.repeatable else option.default for key, option in options_of(SERVE).items()}


def option(role: RoleSpec, name: str) -> str | None:
    """The value of an option on the command line of a role."""
    return next((word.partition("=")[2] for word in role.argv if word.startswith(f"{name}=")), None)


def test_roles_are_numbered_where_there_are_several() -> None:
    assert role_names("gateway", 1) == ["gateway"]
    assert role_names("gateway", 2) == ["gateway-0", "gateway-1"]


@pytest.mark.parametrize("gpus", [0, 2])
def test_secrets_are_in_the_environment_of_a_role_and_not_in_its_arguments(gpus: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("@some,key=hush\n")
    options = options_of(SERVE)
    from_file, plain = options["backend_config"].read_all([f"@{tmp_path}/file", "other,a=b"])
    values = {
        **VALUES,
        "backend_config": (plain, from_file),
        "http_restricted_api": options["http_restricted_api"].read_all(["health:a=hush"]),
        "nats": options["nats"].read("nats://u:hush@host"),
    }
    workers, (gateway,) = worker_roles(values, gpus, 3), gateway_roles(values, 1, "d")
    assert not any("hush" in word for role in (*workers, gateway) for word in role.argv)
    for worker in workers:  # all values of the option, in their order, to be read as on the command line
        passed = taken_from(dict(worker.environment))
        assert passed == {"backend_config": ["other,a=b", "@@some,key=hush"]}
        assert options["backend_config"].read_all(passed["backend_config"]) == values["backend_config"]
    assert taken_from(dict(gateway.environment)) == {"http_restricted_api": ["health:a=hush"]}
    assert [role.environment for role in worker_roles({**values, "backend_config": (plain,)}, 0, 1)] == [{}]


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_a_lone_worker_has_all_devices(gpus: int) -> None:
    (role,) = worker_roles(VALUES, gpus, 1)
    assert role.name == "worker"
    options = [word for word in role.argv if word.startswith("--")]
    assert not [word for word in options if "gpu" in word or "cpu" in word or "memory" in word]


def test_one_worker_for_each_gpu_and_one_of_them_for_the_cpu() -> None:
    roles = worker_roles({**VALUES, "model_load_thread_count": 2}, 3, 3)
    assert [role.name for role in roles] == ["worker-0", "worker-1", "worker-2"]
    assert [option(role, "--gpu") for role in roles] == ["0", "1", "2"]
    assert [option(role, "--cpu-instances") for role in roles] == [None, "false", "false"]
    assert all(option(role, "--model-load-thread-count") == "2" for role in roles)
    assert not any(role.environment for role in roles)
    assert len({role.drain_rank for role in roles}) == 1


def test_workers_beyond_the_gpus_see_none_and_run_cpu_instances() -> None:
    roles = worker_roles(VALUES, 1, 3)
    assert [option(role, "--gpu") for role in roles] == ["0", None, None]
    assert [option(role, "--cpu-instances") for role in roles] == [None, None, None]
    assert [role.environment.get("CUDA_VISIBLE_DEVICES") for role in roles] == [None, "", ""]


def test_workers_have_their_own_processors() -> None:
    shares = ProcessorShares((frozenset({2, 3}), frozenset({4, 5})), frozenset({0, 1}))
    assert [role.processors for role in worker_roles(VALUES, 0, 2, shares)] == [{2, 3}, {4, 5}]
    assert [role.processors for role in worker_roles(VALUES, 0, 2)] == [frozenset(), frozenset()]


def test_a_lone_gateway_shares_nothing() -> None:
    (role,) = gateway_roles(VALUES, 1, "d")
    assert (role.name, role.facts_of) == ("gateway", "")
    assert not [word for word in role.argv if "reuse" in word or "memory" in word or "number" in word]


def test_gateways_share_the_ports_of_the_first() -> None:
    roles = gateway_roles({**VALUES, "http_port": 0}, 3, "d")
    assert [option(role, "--gateway-number") for role in roles] == [None, "1", "2"]
    assert [role.facts_of for role in roles] == ["", "gateway-0", "gateway-0"]
    for role in roles:
        assert (option(role, "--reuse-http-port"), option(role, "--reuse-grpc-port")) == ("true", "true")
        assert (option(role, "--http-port"), option(role, "--durable-id")) == ("0", "d")
        assert role.kept_facts["http_port"] == "--http-port"


def memory(values: dict[str, Any], gateways: int) -> tuple[int, int]:
    """The bytes for requests and for payloads of all gateways together."""
    roles = gateway_roles({**VALUES, **values}, gateways, "d")
    return (
        sum(int(option(role, "--gateway-memory-byte-size") or 0) for role in roles),
        sum(int(option(role, "--payload-memory-byte-size") or 0) for role in roles),
    )


def test_a_limit_of_memory_holds_for_all_gateways_together() -> None:
    requests_bytes, payload_bytes = memory({"gateway_memory_byte_size": 300 << 20}, 3)
    assert requests_bytes == 300 << 20
    assert payload_bytes <= process_budget().total_bytes


def test_the_default_limit_is_what_the_memory_of_the_machine_allows() -> None:
    requests_bytes, _ = memory({}, 3)
    assert requests_bytes == 3 * default_ledger_bytes(3)


def test_a_given_limit_of_payloads_is_each_processs_own() -> None:
    assert memory({"payload_memory_byte_size": 1 << 30}, 2)[1] == 2 << 30
    roles = worker_roles({**VALUES, "payload_memory_byte_size": 1 << 30}, 0, 2)
    assert [option(role, "--payload-memory-byte-size") for role in roles] == [str(1 << 30)] * 2


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with 2 GiB on a machine with 64."""
    for module in (budgets, serve_roles):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: 2 << 30)
        monkeypatch.setattr(module, "machine_memory_bytes", lambda: 64 << 30)


def test_without_a_limit_of_memory_the_roles_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_roles, "available_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(serve_roles, "machine_memory_bytes", lambda: 64 << 30)
    assert share_memory(VALUES, ProcessCounts(1, 1, 1)) == ({}, {}, {})


def test_all_processes_of_a_container_share_its_memory(container: None) -> None:
    left_bytes = (2 << 30) - 6 * PROCESS_BYTES
    shares = share_memory(VALUES, ProcessCounts(1, 1, 1))
    assert shares.gateways == {"gateway_memory_byte_size": left_bytes // 6}
    assert shares.durable == {"gateway_memory_byte_size": left_bytes // 12}
    assert 3 * shares.payloads["payload_memory_byte_size"] <= left_bytes // 4
    assert share_memory(VALUES, ProcessCounts(1, 1, 1), has_console=True).gateways == {
        "gateway_memory_byte_size": (left_bytes - PROCESS_BYTES) // 6
    }
    gateways = gateway_roles({**VALUES, **shares.gateways}, 2, "x")
    assert [option(role, "--gateway-memory-byte-size") for role in gateways] == [str(left_bytes // 12)] * 2


def test_what_is_given_is_not_shared(container: None) -> None:
    values = {**VALUES, "gateway_memory_byte_size": 5 << 20, "payload_memory_byte_size": 6 << 20}
    assert share_memory(values, ProcessCounts(1, 1, 1)) == ({}, {}, {})


def test_streams_have_the_sizes_that_are_given_or_those_of_the_volume() -> None:
    sizes = sizes_of_streams({**VALUES, "result_max_bytes": 7}, 1 << 30)
    assert sizes == {"queue_max_bytes": (1 << 30) * 2 // 5, "dead_max_bytes": (1 << 30) // 20}
    assert sizes_of_streams(VALUES, 1 << 40) == {
        "queue_max_bytes": 8 << 30,
        "result_max_bytes": 8 << 30,
        "dead_max_bytes": 1 << 30,
    }
