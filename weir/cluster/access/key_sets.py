"""`FetchedKeySet`: the keys of an issuer at a URL, fetched again from time to time. The last good copy stays in use."""

from __future__ import annotations

import asyncio
import http.client
import logging
import math
import time
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from weir.access.tokens.signing_keys import MAX_SET_BYTES, SigningKeys

logger = logging.getLogger("weir.access")

REFRESH_S = 300.0
"""How old a key set becomes before it is fetched again."""

RETRY_S = 10.0
"""The time between two fetches of a set that failed, or that lacks a key which a token names."""

FETCH_TIMEOUT_S = 5.0
"""How long a fetch may take from the first byte of the response to the last."""


class FetchTimes:
    """When a key set is fetched. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._last_s = -math.inf
        self._is_wanted = False

    def want(self) -> None:
        """A token names a key that the set lacks."""
        self._is_wanted = True

    def is_due(self, now_s: float) -> bool:
        """Whether to fetch now."""
        return now_s >= self._last_s + (RETRY_S if self._is_wanted else REFRESH_S)

    def begin(self, now_s: float) -> None:
        """A fetch begins."""
        self._last_s = now_s
        self._is_wanted = False

    def fail(self) -> None:
        """The fetch has failed."""
        self._is_wanted = True


class FetchedKeySet:
    """The key set at `url`. `keys` is its last good copy, None before there is one."""

    def __init__(
        self, url: str, fetch: Callable[[str], bytes] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.keys: SigningKeys | None = None
        self._url = url
        self._fetch = fetch or fetch_key_set
        self._clock = clock
        self._times = FetchTimes()
        self._copy = b""
        self._is_fetching = False
        self._is_away = False

    def want(self) -> None:
        """A token names a key that the set lacks: it is fetched again soon."""
        self._times.want()

    @property
    def is_due(self) -> bool:
        """Whether it is to be fetched now."""
        return not self._is_fetching and self._times.is_due(self._clock())

    async def fetch(self) -> bool:
        """Fetches the set, and returns whether there are other keys than before. Logs a failure once."""
        self._is_fetching = True
        self._times.begin(self._clock())
        try:
            data = await asyncio.to_thread(self._fetch, self._url)
            if data != self._copy:
                keys = SigningKeys.parse(data)
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            self._times.fail()
            if not self._is_away:
                follows = "no token of it is accepted" if self.keys is None else "its last copy stays in use"
                reason = str(error) or type(error).__name__
                logger.warning("the key set %s can't be fetched: %s; %s", self._url, reason, follows)
            self._is_away = True
            return False
        finally:
            self._is_fetching = False
        if self._is_away:
            logger.info("the key set %s can be fetched again", self._url)
            self._is_away = False
        if data == self._copy:
            return False
        self.keys, self._copy = keys, data
        return True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect may lead to where nothing proves who answers, so it is an error."""

    def redirect_request(self, *_arguments: Any) -> None:
        """Follows none."""


def fetch_key_set(url: str) -> bytes:
    """The content of a URL. Blocking. Raises OSError, ValueError or HTTPException."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    if urlsplit(url).scheme == "http":  # on this host, where no proxy leads to
        handlers.append(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "weir"})  # noqa: S310 - the policy allows https, and http on loopback
    content = bytearray()
    with urllib.request.build_opener(*handlers).open(request, timeout=FETCH_TIMEOUT_S) as response:
        end_s = time.monotonic() + FETCH_TIMEOUT_S
        while piece := response.read1(1 << 16):
            content += piece
            if len(content) > MAX_SET_BYTES:
                raise ValueError(f"it has more than {MAX_SET_BYTES} bytes")
            if time.monotonic() > end_s:
                raise TimeoutError(f"it takes more than {FETCH_TIMEOUT_S:g} s")
    return bytes(content)
