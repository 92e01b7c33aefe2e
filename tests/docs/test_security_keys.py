"""The sections of docs/security.md on policies, keys and tokens: their commands, in their order, as a reader runs them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from jwt.algorithms import OKPAlgorithm

from tests.support.docs.pages import ROOT, SECURITY
from tests.support.models.zoo import write_identity
from tests.support.servers.demo import environment, in_venv
from tests.support.servers.weir_server import Server
from weir.access.keys.ring import PREFIX
from weir.access.policy.document import parse_policy

SERVE = ".venv/bin/weir serve models --access-policy=access.yaml"
ISSUER = "https://login.example.org"


def section(title: str, language: str) -> list[str]:
    """The blocks of one language in a section of the page."""
    _, _, rest = (ROOT / SECURITY).read_text().partition(f"\n## {title}\n")
    blocks = rest.partition("\n## ")[0].split(f"\n```{language}\n")[1:]
    return [block.partition("\n```")[0] for block in blocks]


class Reader:
    """A reader with a folder and a home of their own, in which only their server runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own = {"XDG_DATA_HOME": str(folder / "home")}

    def run(self, command: str, port: int = 0) -> str:
        """What the command prints; it must succeed."""
        program = os.path.dirname(in_venv(".venv/bin/weir")[0])
        line = command.replace(".venv/bin", program).replace("localhost:8000", f"localhost:{port}")
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=environment() | self.own, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    write_identity(tmp_path / "models", "detector", "FP32")
    (tmp_path / "home").mkdir()
    (policy,) = section("Write a policy", "yaml")
    (tmp_path / "access.yaml").write_text(policy)
    return Reader(tmp_path)


@pytest.mark.timeout(180)
def test_a_policy_and_keys(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    check, serve = "\n".join(section("Write a policy", "sh")).splitlines()
    assert serve == SERVE
    assert reader.run(check) == "access.yaml is valid: 3 roles, 0 issuers, 0 certificates, 0 broker users\n"
    commands = "\n".join(section("Make keys", "sh")).splitlines()
    shown = section("Make keys", "text")[0]
    policy = f"--access-policy={reader.folder / 'access.yaml'}"
    with Server(reader.folder, reader.folder / "models", policy, environment=reader.own) as server:
        server.wait_ready()
        printed = {command: reader.run(command, server.port) for command in commands}
    (curl,) = (text for command, text in printed.items() if command.startswith("curl "))
    assert json.loads(curl)["name"] == "detector"
    (explained,) = (text for command, text in printed.items() if " access check " in command)
    assert explained == f"{shown}\n"
    for name in ("camera-7.key", "camera-7.new", "ci.key"):
        assert (reader.folder / name).read_text().startswith(PREFIX)
    lists = [text for command, text in printed.items() if " key list" in command]
    assert [text.splitlines()[1].split()[1:3] for text in lists] == [["camera-7", "caller"], ["ci", "operator"]]


def test_limits() -> None:
    (policy,) = section("Limit rates and sizes", "yaml")
    limits = parse_policy(policy).roles["caller"].limits
    assert limits is not None
    assert (limits.requests_per_s, limits.body_bytes) == (100, 8_000_000)


def test_tokens_of_an_issuer(reader: Reader) -> None:
    (tokens,) = section("Take tokens of an issuer", "yaml")
    key = ed25519.Ed25519PrivateKey.generate()
    row = {**OKPAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "k"}
    (reader.folder / "issuer.json").write_text(json.dumps({"keys": [row]}))
    # The page's issuer has a URL of no host: the set that it would publish is in a file.
    policy = reader.folder / "access.yaml"
    changed = tokens.replace(f"keys: {ISSUER}/keys.json", "keys: issuer.json")
    assert changed != tokens
    policy.write_text(f"{policy.read_text()}\n{changed}\n")
    claims = {"iss": ISSUER, "aud": "weir", "sub": "alice", "org": "acme", "roles": "caller", "exp": time.time() + 600}
    (reader.folder / "token.jwt").write_text(jwt.encode(claims, key, "EdDSA", {"kid": "k"}))
    (command,) = "\n".join(section("Take tokens of an issuer", "sh")).splitlines()
    assert reader.run(command) == "allowed: rule 1 of role 'caller'\n"


def test_the_users_of_the_broker_are_printed_and_named(reader: Reader) -> None:
    (command,) = section("Let a user of the broker be a principal", "sh")
    (rows,) = section("Let a user of the broker be a principal", "yaml")
    reader.run(command)
    printed = (reader.folder / "users.conf").read_text()
    policy = reader.folder / "access.yaml"
    policy.write_text(f"{policy.read_text()}\n{rows}\n")
    for row in parse_policy(policy.read_text()).broker_users:
        assert f'user: "{row.user}"' in printed
        assert f"$WEIR_USER_{row.user.upper().replace('-', '_')}_PASSWORD" in printed
    assert "weir-producer" not in printed
    assert reader.run(".venv/bin/weir access check --policy=access.yaml").endswith("2 broker users\n")
