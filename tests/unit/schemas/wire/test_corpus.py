"""Messages that running clusters of each release have sent are decoded: during an upgrade they arrive at newer processes.

`python -m tests.support.wire.record_corpus` adds a release. What is there stays as it is, for ever.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.support.wire.decoders import DECODERS
from tests.support.wire.record_corpus import CORPUS
from weir import __version__

RELEASES = sorted(path.name for path in CORPUS.iterdir())


def messages(release: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((CORPUS / release / "messages.json").read_text())
    return rows


def test_this_release_is_recorded() -> None:
    assert __version__ in RELEASES, "run: python -m tests.support.wire.record_corpus"


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_messages_of_every_kind(release: str) -> None:
    kinds = {row["kind"] for row in messages(release)}
    assert DECODERS.keys() >= kinds
    if release == __version__:
        assert DECODERS.keys() == kinds


@pytest.mark.parametrize("release", RELEASES)
def test_every_message_is_decoded(release: str) -> None:
    wrong: dict[str, str] = {}
    for row in messages(release):
        try:
            assert DECODERS[row["kind"]](base64.b64decode(row["data"])) is not None
        except Exception as error:
            wrong[row["subject"]] = repr(error)
    assert wrong == {}


@pytest.mark.parametrize("row", messages(RELEASES[-1])[::7], ids=lambda row: row["kind"])
def test_a_damaged_message_is_noticed(row: dict[str, Any]) -> None:
    """So that the decoders here are ones that can fail."""
    with pytest.raises(Exception, match=r"\w"):
        DECODERS[row["kind"]](b"\x93\x01" + base64.b64decode(row["data"])[: len(row["data"]) // 3])
