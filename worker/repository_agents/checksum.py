"""Triton's agent `checksum`: compares files of a model with the sums in its configuration.

Source: `checksum_repository_agent` of Triton; SHA-256 besides MD5 is Weir's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from weir.repository.paths import path_inside
from weir.schemas.core.errors import ErrorCode, WeirError, invalid

NAME = "checksum"

# MD5 detects accidents, not attacks; it is what configurations for Triton have.
_ALGORITHMS: dict[str, Callable[[], Any]] = {
    "md5": partial(hashlib.md5, usedforsecurity=False),
    "sha256": hashlib.sha256,
}


def check_sums(folder: Path, parameters: Mapping[str, str]) -> None:
    """Raises WeirError, in Triton's words, unless every file has its sum. Keys are `MD5:<file in folder>`. Blocking."""
    for key, expected in parameters.items():
        algorithm, colon, file = key.partition(":")
        if not colon:
            raise invalid(f"failed to parse key: {key}")
        make_hash = _ALGORITHMS.get(algorithm.lower())
        if make_hash is None:
            raise WeirError(ErrorCode.UNSUPPORTED, f"Unsupported checksum algorithm: {algorithm}")
        path = path_inside(folder, file, "model_repository_agents")
        try:
            with path.open("rb") as content:
                actual = hashlib.file_digest(content, make_hash).hexdigest()
        except OSError as error:
            raise invalid(f"failed to open text file for read {file}: {error.strerror}") from error
        if actual != expected:
            raise invalid(f"Mismatched {algorithm.upper()} hash for file {file}, expect: {expected}, got: {actual}")
