"""`Issuers`: the verifiers of the tokens that a policy accepts, with the keys of each issuer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from weir.access.gate import Gate
from weir.access.policy.rules import Issuer
from weir.access.tokens.signing_keys import MAX_SET_BYTES, SigningKeys
from weir.access.tokens.verifier import TokenVerifier, TokenVerifiers, Trust
from weir.cluster.access.followed_file import FollowedFile
from weir.cluster.access.key_sets import FETCH_TIMEOUT_S, FetchedKeySet


class _KeySetFile:
    """A key set in a file."""

    def __init__(self, path: Path) -> None:
        self.keys: SigningKeys | None = None
        self.file = FollowedFile("key set", str(path), MAX_SET_BYTES, SigningKeys.parse)

    def want(self) -> None:
        """A token names a key that the set lacks: the file is looked at each second anyway."""


class Issuers:
    """The issuers of the policy in force. Paths of key sets are relative to `folder`, that of the policy."""

    def __init__(self, gate: Gate, folder: Path, make_fetched: Callable[[str], FetchedKeySet] = FetchedKeySet) -> None:
        self._gate = gate
        self._folder = folder
        self._make_fetched = make_fetched
        self._files: dict[str, _KeySetFile] = {}
        self._fetched: dict[str, FetchedKeySet] = {}
        self._rows: Sequence[Issuer] = ()

    async def start(self, rows: Sequence[Issuer], background: asyncio.TaskGroup) -> None:
        """Accepts the tokens of these issuers. Raises ValueError for a file that can't be read or used.

        Waits for the key sets at URLs as long as a fetch may take; one that can't be fetched keeps nothing from starting.
        """
        self._choose(rows)
        for source in self._files.values():
            source.keys = await source.file.start()
        fetches = [background.create_task(self._fetch(source)) for source in self._fetched.values()]
        if fetches:
            await asyncio.wait(fetches, timeout=FETCH_TIMEOUT_S)
        self._apply()

    def use(self, rows: Sequence[Issuer]) -> None:
        """Accepts the tokens of these issuers from now on. Key sets that are not read yet follow with the next `look`."""
        if rows != self._rows:
            self._choose(rows)
            self._apply()

    async def look(self, background: asyncio.TaskGroup) -> None:
        """Reads the key sets in files that have changed, and fetches in the background those that are due."""
        changed = False
        for source in self._files.values():
            keys = await source.file.changed()
            if keys is not None:
                source.keys, changed = keys, True
        if changed:
            self._apply()
        for fetched in self._fetched.values():
            if fetched.is_due:
                background.create_task(self._fetch(fetched))

    async def _fetch(self, source: FetchedKeySet) -> None:
        if await source.fetch():
            self._apply()

    def _choose(self, rows: Sequence[Issuer]) -> None:
        """Keeps the key sets that the rows name, with their keys, and drops all others."""
        self._rows = rows
        files, urls = ({row.keys for row in rows if row.has_url is is_url} for is_url in (False, True))
        self._files = {name: self._files.get(name) or _KeySetFile(self._folder / name) for name in sorted(files)}
        self._fetched = {url: self._fetched.get(url) or self._make_fetched(url) for url in sorted(urls)}

    def _apply(self) -> None:
        self._gate.use_tokens(TokenVerifiers([self._verifier(row) for row in self._rows]) if self._rows else None)

    def _verifier(self, row: Issuer) -> TokenVerifier:
        claims, source = row.claims, self._fetched[row.keys] if row.has_url else self._files[row.keys]
        trust = Trust(row.issuer, row.audience, claims.principal, claims.tenant, claims.roles, row.leeway_s)
        verifier = TokenVerifier(trust, source.want)
        if source.keys is not None:
            verifier.use(source.keys)
        return verifier
