"""Runs `weir access check`: explains what the policy decides about a key, a token or nobody."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import typer

from weir.access.gate import Gate, Shown
from weir.access.keys.ring import PREFIX, KeyRecord, KeyRing
from weir.access.policy.actions import Action
from weir.access.policy.decision import Decision
from weir.access.policy.rules import ANONYMOUS, AccessPolicy
from weir.access.principal import NOBODY, Principal, Proof
from weir.cluster.access.service import policy_file
from weir.commands.running_server import unwrap_exception_groups
from weir.errors import StartError
from weir.options import UsageError
from weir.schemas.core.errors import WeirError

MAX_SECRET_BYTES = 16 * 1024


def read_policy(path: Path) -> AccessPolicy:
    """The policy in a file. Raises StartError with the place of what is wrong."""
    try:
        return asyncio.run(policy_file(str(path)).start())
    except ValueError as error:
        raise StartError(str(error)) from error


def validate(path: Path) -> None:
    """Prints what a policy has, or raises StartError with the place of what is wrong."""
    policy = read_policy(path)
    counts = {
        "role": len(policy.roles),
        "issuer": len(policy.tokens),
        "certificate": len(policy.certificates),
        "broker user": len(policy.broker_users),
    }
    parts = [f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items()]
    typer.echo(f"{path} is valid: {', '.join(parts)}")


class Question(NamedTuple):
    """What somebody wants to do. `version` is "" for the latest of the model."""

    action: Action
    model: str
    version: str


class PolicyCheck:
    """Decides as a server with this policy does. Paths in it are relative to `folder`; `keys` reads the keys."""

    def __init__(self, policy: AccessPolicy, folder: Path, keys: Callable[[], KeyRing]) -> None:
        self._policy = policy
        self._folder = folder
        self._keys = keys
        self._gate = Gate(time.time)
        self._gate.use_policy(policy)

    def run(self, shown: str, question: Question) -> int:
        """Prints the decision. Returns the exit status: 0 for allowed, 1 for denied.

        `shown` is "@FILE" or "-" for a key or a token in a file or on stdin, "anonymous", or the name or id of a key.
        Raises StartError, UsageError.
        """
        try:
            decision = self._gate.decide(self._principal(shown), *question)
        except WeirError as error:
            decision = Decision(False, error.message)
        typer.echo(f"{'allowed' if decision.is_allowed else 'denied'}: {decision.why}")
        return 0 if decision.is_allowed else 1

    def _principal(self, shown: str) -> Principal:
        if shown == ANONYMOUS:
            return NOBODY
        if shown == "-" or shown.startswith("@"):
            return self._of_secret(_secret(shown))
        if shown.startswith(PREFIX) and len(shown) > len(PREFIX) + 32:
            raise UsageError("a key must not stand in a command line, which other users can read: give @FILE or -")
        return _holder(self._keys().records, shown)

    def _of_secret(self, secret: str) -> Principal:
        """Raises WeirError for one that lets nobody in."""
        if secret.startswith(PREFIX):
            self._gate.use_keys(self._keys())
        elif self._policy.tokens:
            asyncio.run(self._use_issuers())
        return self._gate.principal_of(Shown(f"Bearer {secret}".encode()))

    async def _use_issuers(self) -> None:
        from weir.cluster.access.issuers import Issuers

        try:
            with unwrap_exception_groups(ValueError):
                async with asyncio.TaskGroup() as background:
                    await Issuers(self._gate, self._folder).start(self._policy.tokens, background)
        except ValueError as error:
            raise StartError(str(error)) from error


def action_of(word: str) -> Action:
    """The action of this word. Raises UsageError."""
    known = {action.value: action for action in Action}
    if word not in known:
        raise UsageError(f"unknown action {word!r}; expected one of {', '.join(known)}")
    return known[word]


def _holder(records: list[KeyRecord], name_or_id: str) -> Principal:
    found = [record for record in records if name_or_id in (record.id, record.name) and record.is_live(time.time())]
    if not found:
        raise StartError(f"there is no valid key of the name or id {name_or_id!r}")
    if len({record.roles for record in found}) > 1:
        ids = ", ".join(record.id for record in found)
        raise StartError(f"the keys of {name_or_id!r} have other roles each: give one of the ids {ids}")
    record = found[0]
    return Principal(record.name, record.tenant, frozenset(record.roles), Proof.KEY, record.id)


def _secret(shown: str) -> str:
    try:
        data = sys.stdin.buffer.read(MAX_SECRET_BYTES) if shown == "-" else Path(shown[1:]).read_bytes()
        return data[:MAX_SECRET_BYTES].decode().strip()
    except OSError as error:
        raise StartError(f"{shown[1:]} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise StartError(f"{shown[1:] or 'stdin'} holds no key and no token") from None
