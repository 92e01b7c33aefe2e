"""`weir key` and `weir access check` with a file of keys, as a user runs them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from weir.access.keys.ring import KeyRing
from weir.cluster.access.key_file import KeyFile
from weir.commands.access.command import _complete_action
from weir.commands.app import main
from weir.commands.local.servers import LocalServer

POLICY = """roles:
  anonymous:
    rules:
      - actions: [health]
  caller:
    rules:
      - model: "det*"
        versions: [1]
        actions: [infer]
"""


class Ran(NamedTuple):
    status: Any
    out: str
    err: str


class Cli:
    """A folder with a policy and a file of keys, and the commands that use them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.file = f"--file={folder / 'keys.json'}"
        self.policy = f"--policy={folder / 'policy.yaml'}"
        (folder / "policy.yaml").write_text(POLICY)
        self._capsys = capsys

    def run(self, *words: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = self._capsys.readouterr()
        return Ran(ended.value.code, out, err)

    def key(self, *words: str) -> Ran:
        return self.run("key", *words, self.file)

    def check(self, *words: str) -> Ran:
        return self.run("access", "check", *words, self.policy, self.file)

    def ring(self) -> KeyRing:
        return KeyFile(self.folder / "keys.json").ring()


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys)


def test_a_key_is_shown_once_and_alone_on_stdout(cli: Cli) -> None:
    made = cli.key("create", "camera", "--role=caller", "--role=operator", "--tenant=acme", "--expires=90d")
    (record,) = cli.ring().records
    assert (record.name, record.roles, record.tenant) == ("camera", ("caller", "operator"), "acme")
    assert record.expires_s - record.created_s == 90 * 86400
    key = made.out.removesuffix("\n")
    assert cli.ring().find(key, record.created_s) == record
    assert made.err.startswith(f"new key {record.id} of camera: roles caller, operator, tenant acme, expires 2")
    secret = key.rpartition("_")[2]
    listed, listed_json = cli.key("list"), cli.key("list", "--json")
    for text in (made.err, listed.out, listed_json.out, (cli.folder / "keys.json").read_text()):
        assert secret not in text
    assert record.hash not in listed.out + listed_json.out
    assert listed.out.splitlines()[1].split()[:4] == [record.id, "camera", "caller,operator", "acme"]
    (row,) = json.loads(listed_json.out)
    assert (row["id"], row["valid"], row["expires_s"]) == (record.id, True, record.expires_s)


def test_a_key_is_rotated_and_revoked(cli: Cli) -> None:
    old = cli.key("create", "camera", "--role=caller").out.strip()
    new = cli.key("rotate", "camera", "--overlap=10m")
    first, second = sorted(cli.ring().records, key=lambda record: not record.expires_s)
    assert first.expires_s - second.created_s == 600
    assert new.err.count("\n") == 2
    now_s = second.created_s
    assert [cli.ring().find(key, now_s) for key in (old, new.out.strip())] == [first, second]
    third = cli.key("rotate", "camera")
    assert third.status == 1
    assert "has 2 valid keys" in third.err
    assert cli.key("revoke", first.id).status == 0
    assert cli.ring().records == [second]
    assert cli.key("revoke", "camera").status == 0
    assert cli.key("list").out == "no keys\n"
    assert cli.key("revoke", "camera") == Ran(1, "", "error: there is no key of the name or id 'camera'\n")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("create", "", "--role=r"), "the name '' is no printable text"),
        (("create", "a\x1b", "--role=r"), "is no printable text"),
        (("create", "a", "--role="), "the role '' is no printable text"),
        (("create", "a", "--role=r", "--expires=never"), "--expires takes a number and a unit"),
        (("rotate", "a", "--overlap=0s"), "--overlap takes a number and a unit"),
    ],
)
def test_wrong_words_are_explained(cli: Cli, words: tuple[str, ...], reason: str) -> None:
    ran = cli.key(*words)
    assert (ran.status, ran.out) == (2, "")
    assert reason in ran.err
    assert cli.ring().records == []


def test_a_malformed_file_is_not_replaced(cli: Cli) -> None:
    (cli.folder / "keys.json").write_text("{")
    ran = cli.key("create", "a", "--role=r")
    assert ran.status == 1
    assert "keys.json: Input data was truncated" in ran.err
    assert (cli.folder / "keys.json").read_text() == "{"


def test_decisions_are_explained(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    key = cli.key("create", "camera", "--role=caller").out
    (cli.folder / "key").write_text(key)
    shown = f"@{cli.folder / 'key'}"
    allowed = Ran(0, "allowed: rule 1 of role 'caller'\n", "")
    assert cli.check(shown, "infer", "detector", "--version=1") == allowed
    assert cli.check("camera", "infer", "detector", "--version=1") == allowed
    assert cli.check(cli.ring().records[0].id, "infer", "detector", "--version=1") == allowed
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(key.encode())))
    assert cli.check("-", "infer", "detector", "--version=1") == allowed
    denied = "denied: no rule allows the role caller 'infer' on model 'detector' version 2\n"
    assert cli.check(shown, "infer", "detector", "--version=2") == Ran(1, denied, "")
    assert cli.check("anonymous", "health").out == "allowed: rule 1 of role 'anonymous'\n"
    assert cli.check("anonymous", "infer", "detector").status == 1
    cli.key("revoke", "camera")
    assert cli.check(shown, "infer") == Ran(1, "denied: the key is unknown, revoked or expired\n", "")
    assert cli.check("camera", "infer").err == "error: there is no valid key of the name or id 'camera'\n"


def test_a_key_in_the_command_line_is_refused_and_not_repeated(cli: Cli) -> None:
    key = cli.key("create", "camera", "--role=caller").out.strip()
    ran = cli.check(key, "infer")
    assert (ran.status, ran.out) == (2, "")
    assert "give @FILE or -" in ran.err
    assert key.rpartition("_")[2] not in ran.err


def test_a_policy_is_checked(cli: Cli) -> None:
    policy = cli.folder / "policy.yaml"
    ran = cli.run("access", "check", cli.policy)
    assert ran == Ran(0, f"{policy} is valid: 2 roles, 0 issuers, 0 certificates, 0 broker users\n", "")
    policy.write_text("roles:\n  a: {rule: 1}\n")
    ran = cli.run("access", "check", cli.policy)
    assert ran.status == 1
    assert f"access policy {policy}: line 2, column 7: roles.a.rule: " in ran.err
    assert "an action too" in cli.run("access", "check", "camera").err
    assert "unknown action 'fly'; expected one of health, " in cli.check("camera", "fly").err


def test_the_server_of_this_machine_names_its_policy_and_its_keys(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    server = LocalServer(None, "", "", "", str(cli.folder / "policy.yaml"), str(cli.folder / "keys.json"))
    for module in ("command", "stores"):
        monkeypatch.setattr(f"weir.commands.access.{module}.only_local_server", lambda *_given: server)
    assert cli.run("key", "create", "camera", "--role=caller").status == 0
    assert [record.name for record in cli.ring().records] == ["camera"]
    ran = cli.run("access", "check", "camera", "infer", "detector", "--version=1")
    assert (ran.status, ran.out) == (0, "allowed: rule 1 of role 'caller'\n")
    server = server._replace(access_policy="", access_keys="")
    assert cli.run("access", "check", "anonymous", "load").out == "allowed: the server has no access policy\n"


def test_actions_are_completed() -> None:
    assert _complete_action("me") == ["metadata", "metrics"]
