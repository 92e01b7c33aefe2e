"""What the gate of a process goes by: its policy file, its keys and its issuers, each followed while it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from tests.support.waiting import eventually
from weir.access.gate import Gate, Shown
from weir.access.keys.ring import KeyRing
from weir.access.policy.actions import Action
from weir.bus.kv.access_keys import AccessKeys
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.cluster.access.key_file import KeyFile
from weir.cluster.access.service import AccessService
from weir.runtime import extras
from weir.schemas.core.errors import ErrorCode, WeirError

POLICY = """roles:
  caller:
    rules:
      - actions: [infer]
"""

NOW_S = 1_800_000_000.0


class Options(NamedTuple):
    access_policy: str = ""
    access_keys: str = ""


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def is_let_in(gate: Gate, key: str) -> bool:
    try:
        return bool(gate.principal_of(Shown(bearer(key))).name)
    except WeirError as error:
        if error.code is not ErrorCode.UNAUTHENTICATED:
            raise
        return False


def may_infer(gate: Gate, key: str) -> bool:
    return gate.may(gate.principal_of(Shown(bearer(key))), Action.INFER, "m")


def create(name: str, role: str = "caller") -> tuple[list[str], Any]:
    """A change of a ring that makes a key, and the list that receives the key."""
    made: list[str] = []

    def change(ring: KeyRing) -> KeyRing:
        ring, key = ring.create(name, [role], NOW_S)
        made[:] = [key]
        return ring

    return made, change


def write(path: Path, text: str | None) -> None:
    path.unlink() if text is None else path.write_text(text)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def key_file(tmp_path: Path) -> KeyFile:
    file = KeyFile(tmp_path / "keys.json")
    file.change(lambda ring: ring)
    return file


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


def service_of(policy: Path, keys: str = "", bus: object = None) -> tuple[AccessService, Gate]:
    gate = Gate(Clock())
    return AccessService(cast(Bus, bus), gate, Options(str(policy), keys)), gate


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_without_a_policy_nothing_is_read_and_the_gate_is_open() -> None:
    gate = Gate(Clock())
    async with asyncio.TaskGroup() as background:
        service = AccessService(cast(Bus, None), gate, Options())
        await service.start(background)
        assert not gate.is_on
        with pytest.raises(ValueError, match=r"--access-keys requires --access-policy"):
            await AccessService(cast(Bus, None), gate, Options(access_keys="k")).start(background)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("roles:\n  caller:\n    rules: 7\n", r"policy\.yaml: line 3, column 5: roles\.caller\.rules: .*"),
        ("roles: {\n", r"policy\.yaml: line 2, column 1: .*"),
        ("[" * 5000, r"policy\.yaml: .*"),
        ("tokens:\n  - {issuer: i, audience: a, keys: 'http://example.org/k'}\n", r"line 2, column 30: .*https://"),
        (
            "tokens:\n  - {issuer: i, audience: a, keys: none.json}\n",
            r"key set .*none\.json can't be read: No such file",
        ),
        (None, r"policy\.yaml can't be read: No such file"),
    ],
)
async def test_a_bad_policy_ends_the_start_and_says_where(
    policy: Path, key_file: KeyFile, text: str | None, reason: str
) -> None:
    write(policy, text)
    service, gate = service_of(policy, str(key_file._path))
    async with asyncio.TaskGroup() as background:
        with pytest.raises(ValueError, match=reason):
            await service.start(background)
    assert not gate.is_on


async def test_the_start_names_the_extra_that_is_missing(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_there", lambda _module: False)
    service, _ = service_of(policy)
    async with asyncio.TaskGroup() as background:
        with pytest.raises(ValueError, match=r"--access-policy needs the extra access: pip install"):
            await service.start(background)


async def test_a_bad_edit_keeps_the_policy_and_is_logged_once(
    policy: Path, key_file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    made, change = create("a")
    key_file.change(change)
    service, gate = service_of(policy, str(key_file._path))
    async with asyncio.TaskGroup() as background:
        await service.start(background)
        service.stop()  # the test looks itself
        (key,) = made
        assert may_infer(gate, key)
        write(policy, "roles:\n  caller: [\n")
        for _ in range(3):
            await service.look(background)
        assert may_infer(gate, key)
        (complaint,) = complaints(caplog)
        assert "policy.yaml: line 3, column 1" in complaint
        assert "stays in force" in complaint
        write(policy, None)
        for _ in range(3):
            await service.look(background)
        assert may_infer(gate, key)
        assert ["can't be read" in line for line in complaints(caplog)] == [False, True]
        write(policy, POLICY.replace("infer", "metadata"))
        await service.look(background)
        assert not may_infer(gate, key)
        assert len(complaints(caplog)) == 2


async def test_a_key_of_a_file_is_revoked(policy: Path, key_file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    made, change = create("a")
    key_file.change(change)
    service, gate = service_of(policy, str(key_file._path))
    async with asyncio.TaskGroup() as background:
        await service.start(background)
        service.stop()
        (key,) = made
        assert is_let_in(gate, key)
        write(key_file._path, "{}garbage")
        await service.look(background)
        await service.look(background)
        assert is_let_in(gate, key)
        assert len(complaints(caplog)) == 1
        write(key_file._path, "{}")
        await service.look(background)
        assert not is_let_in(gate, key)


async def test_every_process_follows_the_bucket_of_keys(policy: Path, nats: EmbeddedNats) -> None:
    async with asyncio.TaskGroup() as background:
        buses = [await Bus.connect(nats.url, "test", background) for _ in range(3)]
        gates = []
        for bus in buses[:2]:  # the bucket does not exist yet
            service, gate = service_of(policy, bus=bus)
            await service.start(background)
            gates.append(gate)
        operator = AccessKeys(buses[2])
        await operator.start()
        made, change = create("a")
        await operator.change("a", change)
        (key,) = made
        await eventually(lambda: all(is_let_in(gate, key) for gate in gates))
        late, gate = service_of(policy, bus=buses[0])
        await late.start(background)
        assert is_let_in(gate, key)
        await operator.change("a", lambda ring: ring.revoke("a"))
        await eventually(lambda: not any(is_let_in(gate, key) for gate in (*gates, gate)))
        for task in list(background._tasks):
            task.cancel()
        for bus in buses:
            await bus.close()


async def test_two_changes_of_one_name_at_a_time_lose_nothing(nats: EmbeddedNats) -> None:
    async with asyncio.TaskGroup() as background:
        buses = [await Bus.connect(nats.url, "test", background) for _ in range(2)]
        operators = [AccessKeys(bus) for bus in buses]
        for operator in operators:
            await operator.start()
        changes = [create("a"), create("a")]
        await asyncio.gather(*(op.change("a", change) for op, (_, change) in zip(operators, changes, strict=True)))
        await eventually(lambda: all(len(operator.ring().records) == 2 for operator in operators))
        for (key,), _ in changes:
            assert operators[0].ring().find(key, NOW_S) is not None
        for bus in buses:
            await bus.close()


async def test_keys_of_a_bucket_that_was_created_anew_let_nobody_in(policy: Path, nats: EmbeddedNats) -> None:
    async with asyncio.TaskGroup() as background:
        buses = [await Bus.connect(nats.url, "test", background) for _ in range(2)]
        operator, follower = [AccessKeys(bus) for bus in buses]
        await operator.start()
        await follower.start(is_maker=False)
        made, change = create("a")
        await operator.change("a", change)
        await eventually(lambda: follower.get("a"))
        await buses[0].jetstream.delete_stream("KV_access_keys")
        await follower.read_again()
        assert follower.ring().find(made[0], NOW_S) is None
        again = AccessKeys(buses[0])
        await again.start()
        await again.change("b", create("b")[1])
        await follower.read_again()
        assert follower.names() == {"b"}
        for bus in buses:
            await bus.close()
