"""The handshake of links between hosts: both ends prove that they know a secret. Sans-IO.

A process that listens draws a secret and sends it through the broker to processes that are permitted to ask for it there.
The secret is never sent on the link itself: each end sends a nonce, and a code over both nonces that only the secret
produces. The end that has connected begins:

1. the opening end sends its version of the frames and its nonce,
2. the listening end responds with the version that both have, its nonce and its code,
3. the opening end sends its code.

That is the lower of their versions. An end rejects the link if it is older than `OLDEST_VERSION`.
Source: RFC 2104 (HMAC); challenge and response with the ends' roles in the signed text, so that neither can be replayed.
"""

from __future__ import annotations

import hmac
import secrets

VERSION = 1
"""The version of the frames and messages on links between hosts."""

OLDEST_VERSION = 1
"""The oldest one that this process can use: the one before, so that processes can be replaced one by one."""

SECRET_BYTES = 32
NONCE_BYTES = 16
PROOF_BYTES = 32

_MAGIC = b"weir link"
_HELLO_BYTES = len(_MAGIC) + 1 + NONCE_BYTES


class HandshakeError(ConnectionError):
    """The other end has another version, or does not know the secret."""


def new_secret() -> bytes:
    """Returns a new secret of a listening process."""
    return secrets.token_bytes(SECRET_BYTES)


class Handshake:
    """One end of a link. `is_proven` becomes true when the other end has proven that it knows `secret`."""

    def __init__(self, secret: bytes, is_opening: bool) -> None:
        self._secret = secret
        self._is_opening = is_opening
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self.version = VERSION
        """The version of the link, once the other end's is known."""
        self.is_proven = False

    def begin(self) -> bytes:
        """Returns the first message of the opening end, and the beginning of the other's."""
        return _MAGIC + bytes((self.version,)) + self._nonce

    def receive(self, data: bytes) -> bytes:
        """Takes a message of the other end; returns the one to send, which may be empty. Raises HandshakeError."""
        if self._peer_nonce:
            self._check(data)
            return b""
        if data[: len(_MAGIC)] != _MAGIC or len(data) < _HELLO_BYTES:
            raise HandshakeError("the other end does not begin as a link does")
        self.version = min(data[len(_MAGIC)], VERSION)
        if self.version < OLDEST_VERSION:
            raise HandshakeError(
                f"the other end has version {self.version} of links, this process versions {OLDEST_VERSION} to {VERSION}"
            )
        self._peer_nonce = data[len(_MAGIC) + 1 : _HELLO_BYTES]
        if self._is_opening:
            self._check(data[_HELLO_BYTES:])
            return self._proof(is_opening=True)
        return self.begin() + self._proof(is_opening=False)

    def _check(self, proof: bytes) -> None:
        if self.is_proven or not hmac.compare_digest(proof, self._proof(not self._is_opening)):
            raise HandshakeError("the other end does not prove that it knows the secret")
        self.is_proven = True

    def _proof(self, is_opening: bool) -> bytes:
        nonces = (self._nonce, self._peer_nonce) if self._is_opening else (self._peer_nonce, self._nonce)
        role = b"weir link, opening end" if is_opening else b"weir link, listening end"
        return hmac.digest(self._secret, b"".join((role, *nonces)), "sha256")
