"""How the two ends of a connection between processes prove to each other that they know the secret of the one that listens.

The secret was told by the broker, to who may ask there. It never travels on the connection itself: each end draws a nonce,
and sends a code over both nonces that only the secret makes.
Source: RFC 2104 (HMAC); challenge and response with the ends' roles in what is signed, so that neither can be played back.
"""

from __future__ import annotations

import hmac
import secrets

SECRET_BYTES = 32
NONCE_BYTES = 16
PROOF_BYTES = 32


def new_secret() -> bytes:
    """The secret of one process that listens."""
    return secrets.token_bytes(SECRET_BYTES)


def new_nonce() -> bytes:
    """What one end of a connection draws."""
    return secrets.token_bytes(NONCE_BYTES)


def reader_proof(secret: bytes, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
    """What the end sends that has connected."""
    return hmac.digest(secret, b"weir payload reader" + owner_nonce + reader_nonce, "sha256")


def owner_proof(secret: bytes, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
    """What the end answers that listens."""
    return hmac.digest(secret, b"weir payload owner" + owner_nonce + reader_nonce, "sha256")


def is_proof(given: bytes | memoryview, expected: bytes) -> bool:
    """Compares them in a time that tells nothing."""
    return hmac.compare_digest(given, expected)
