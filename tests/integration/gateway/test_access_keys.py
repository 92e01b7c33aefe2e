"""A `weir serve` with an access policy and two gateways: every process of it follows the policy and the keys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models.zoo import write_identity
from tests.support.servers.several_gateways import processes_of
from tests.support.servers.weir_server import Server, clean_environment
from tests.support.waiting import eventually, wait_until
from weir.access.gate import Gate, Shown
from weir.bus.nats.connection import Bus
from weir.cluster.access.service import AccessService
from weir.gateway.settings import GatewaySettings
from weir.schemas.core.errors import WeirError

POLICY = (
    "roles:\n  anonymous:\n    rules:\n      - actions: [health]\n"
    "  caller:\n    rules:\n      - actions: [infer, health, metadata]\n"
)
FOLLOWERS = 3
"""Two gateways and the process of durable requests; there is no console with drawn ports."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("access")
    write_identity(folder / "models", "m", "FP32")
    (folder / "policy.yaml").write_text(POLICY)
    with Server(folder, folder / "models", "--gateways=2", f"--access-policy={folder / 'policy.yaml'}") as server:
        yield server


def weir(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "weir", *words],
        env=clean_environment(folder),
        capture_output=True,
        text=True,
        timeout=60.0,
    )


def logged(server: Server, text: str, times: int = FOLLOWERS) -> None:
    wait_until(lambda: server.log().count(text) == times)


async def test_a_key_reaches_every_process_and_is_revoked_in_each(served: Server) -> None:
    nats = f"--nats={served.nats_url}"
    policy = served.folder / "policy.yaml"
    assert served.printed_value("access") == str(policy)
    logged(served, f"the access policy {policy} is in force")
    made = weir(served.folder, "key", "create", "camera", "--role=caller", nats)
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    logged(served, "keys of 'camera' have changed: it has 1")
    assert weir(served.folder, "key", "rotate", "camera", nats).returncode == 0
    logged(served, "keys of 'camera' have changed: it has 2")
    (served.folder / "key").write_text(key)
    check = ("access", "check", f"@{served.folder / 'key'}", "infer", "m", f"--policy={policy}", nats)
    assert weir(served.folder, *check).stdout == "allowed: rule 1 of role 'caller'\n"

    def lets_in(gate: Gate) -> bool:
        try:
            return gate.principal_of(Shown(f"Bearer {key}".encode())).name == "camera"
        except WeirError:
            return False

    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(served.nats_url, "test", background)
        gate = Gate(lambda: 1_700_000_000.0)
        service = AccessService(bus, gate, GatewaySettings(nats_url="", access_policy=str(policy)))
        await service.start(background)
        assert lets_in(gate)
        assert weir(served.folder, "key", "revoke", "camera", nats).returncode == 0
        await eventually(lambda: not lets_in(gate))
        service.stop()
        await bus.close()
    logged(served, "keys of 'camera' have changed: it has 0")
    assert json.loads(weir(served.folder, "key", "list", "--json", nats).stdout) == []
    assert weir(served.folder, *check).stdout == "denied: the key is unknown, revoked or expired\n"
    assert key.rpartition("_")[2] not in served.log()


def test_a_bad_edit_is_logged_by_every_process_and_a_gateway_that_starts_again_does_not_start_open(
    served: Server,
) -> None:
    policy = served.folder / "policy.yaml"
    policy.write_text(POLICY + "      - action: [load]\n")
    logged(served, f"access policy {policy}: line 8, column 9: roles.caller.rules.1.action")
    policy.write_text(POLICY)
    logged(served, f"access policy {policy} has changed, and is in force")
    before = served.log().count(f"the access policy {policy} is in force")
    first = processes_of(served, "gateway")[0]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(processes_of(served, "gateway")) == 2 and first not in processes_of(served, "gateway"))
    logged(served, f"the access policy {policy} is in force", before + 1)
    wait_until(lambda: served.is_ready("m"))


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        ("roles: 7\n", ["--access-policy={}"], "line 1, column 1: roles: "),
        (None, ["--access-policy={}"], "policy.yaml can't be read: No such file or directory"),
        (None, ["--http-address=0.0.0.0", "--require-access-policy"], "other hosts can reach HTTP"),
        (None, ["--console-address=0.0.0.0", "--console-port=0", "--require-access-policy"], "reach the console"),
    ],
)
def test_a_start_that_would_be_open_or_wrong_is_refused(
    tmp_path: Path, policy: str | None, options: list[str], reason: str
) -> None:
    write_identity(tmp_path / "models", "m", "FP32")
    if policy is not None:
        (tmp_path / "policy.yaml").write_text(policy)
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--data-dir={tmp_path / 'data'}")
    given = [option.format(tmp_path / "policy.yaml") for option in options]
    ran = weir(tmp_path, "serve", f"--model-repository={tmp_path / 'models'}", *ports, *given)
    assert ran.returncode == 1
    assert reason in ran.stderr.splitlines()[-1]


def test_a_start_that_other_hosts_can_reach_says_so(tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "m", "FP32")
    with Server(tmp_path, tmp_path / "models", "--http-address=0.0.0.0") as server:
        said = "other hosts can reach HTTP and metrics without an access policy"
        assert said in server.printed()
        assert said in server.log()


def test_keys_outlive_the_broker_and_are_followed_after_it(served: Server) -> None:
    nats = f"--nats={served.nats_url}"
    assert weir(served.folder, "key", "create", "robot", "--role=caller", nats).returncode == 0
    logged(served, "keys of 'robot' have changed: it has 1")
    served.kill("nats")
    wait_until(lambda: "nats" in served.pids())
    wait_until(lambda: weir(served.folder, "key", "revoke", "robot", nats).returncode == 0, 60.0)
    logged(served, "keys of 'robot' have changed: it has 0")
    wait_until(lambda: served.is_ready("m"))
