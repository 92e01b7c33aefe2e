"""`AccessService`: sets what the gate of a process goes by, and follows each change of it.

What needs the extra `access` is imported only with the option --access-policy.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weir.access.gate import Gate
from weir.access.keys.ring import KeyRing
from weir.access.policy.rules import AccessPolicy
from weir.bus.kv.access_keys import AccessKeys
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.cluster.access import key_file
from weir.cluster.access.followed_file import FollowedFile
from weir.runtime.extras import is_installed, missing_extra
from weir.runtime.ticks import next_tick

if TYPE_CHECKING:
    from weir.cluster.access.issuers import Issuers

logger = logging.getLogger("weir.access")

LOOK_S = 1.0
"""The time between two looks at the files."""

READ_AGAIN_S = 30.0
"""The time between two readings of the bucket of keys, which otherwise reports each change itself."""


class AccessSettings(Protocol):
    """The options of a process that has a gate; "" for one that is not given."""

    @property
    def access_policy(self) -> str:
        """The file of the policy."""

    @property
    def access_keys(self) -> str:
        """The file of the keys; without it they are in the bucket."""


class AccessService:
    """Feeds `gate` with the policy, the keys and the issuers' keys. Does nothing without --access-policy."""

    def __init__(self, bus: Bus, gate: Gate, settings: AccessSettings) -> None:
        self.gate = gate
        self._bus = bus
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._policy: FollowedFile[AccessPolicy] | None = None
        self._key_file: FollowedFile[KeyRing] | None = None
        self._keys: AccessKeys | None = None
        self._read_s = -math.inf
        self._issuers: Issuers | None = None

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Reads the policy, the keys and the key sets, and follows them. The gate decides by them when this returns.

        Raises ValueError for a file that can't be read or used, with the place of what is wrong, and for a missing extra;
        NatsError, OSError or TimeoutError if the broker is lost meanwhile.
        """
        if not self._settings.access_policy:
            if self._settings.access_keys:
                raise ValueError("--access-keys requires --access-policy")
            return
        self._policy = policy_file(self._settings.access_policy)
        policy = await self._policy.start()
        await self._start_keys()
        await self._start_issuers(policy, background)
        self.gate.use_policy(policy)  # last: whoever asks meanwhile finds no half of it
        logger.info("the access policy %s is in force", self._policy.path)
        self._task = background.create_task(self._follow(background))

    def stop(self) -> None:
        """Follows no more changes. The gate stays as it is."""
        if self._task is not None:
            self._task.cancel()

    async def _start_keys(self) -> None:
        path = self._settings.access_keys
        if path:
            self._key_file = FollowedFile("key file", path, key_file.MAX_BYTES, key_file.parse_keys)
            self.gate.use_keys(await self._key_file.start())
            return
        self._keys = keys = AccessKeys(self._bus)
        await keys.start(is_maker=False)
        self._read_s = time.monotonic()
        self.gate.use_keys(keys.ring())

        def apply(name: str) -> None:
            self.gate.use_keys(keys.ring())
            held = keys.get(name)
            logger.info("keys of %r have changed: it has %d", name, 0 if held is None else len(held.keys))

        keys.on_change(apply)

    async def _start_issuers(self, policy: AccessPolicy, background: asyncio.TaskGroup) -> None:
        from weir.cluster.access.issuers import Issuers

        self._issuers = Issuers(self.gate, Path(self._settings.access_policy).parent)
        await self._issuers.start(policy.tokens, background)

    async def _follow(self, background: asyncio.TaskGroup) -> None:
        while True:
            await next_tick(LOOK_S)
            await self.look(background)

    async def look(self, background: asyncio.TaskGroup) -> None:
        """Applies what has changed since the last look."""
        assert self._policy is not None  # noqa: S101 - set by `start`
        assert self._issuers is not None  # noqa: S101 - set by `start`
        policy = await self._policy.changed()
        if policy is not None:
            self.gate.use_policy(policy)
            self._issuers.use(policy.tokens)
        if self._key_file is not None:
            ring = await self._key_file.changed()
            if ring is not None:
                self.gate.use_keys(ring)
        await self._issuers.look(background)
        if self._keys is not None and self._bus.is_connected and time.monotonic() >= self._read_s + READ_AGAIN_S:
            self._read_s = time.monotonic()
            try:
                await self._keys.read_again()
            except BROKER_ERRORS as error:
                logger.warning("the keys can't be read: %s: %s; those known stay in force", type(error).__name__, error)


def policy_file(path: str) -> FollowedFile[AccessPolicy]:
    """The policy in a file. Raises ValueError without the extra `access`."""
    if not is_installed("access"):
        raise ValueError(missing_extra("--access-policy", "access"))
    from weir.access.policy.document import MAX_POLICY_BYTES, parse_policy

    # A character has at most four bytes.
    return FollowedFile("access policy", path, 4 * MAX_POLICY_BYTES, lambda data: parse_policy(data.decode()))
