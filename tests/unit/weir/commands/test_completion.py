"""Which names a completion offers, whatever a server replies."""

from __future__ import annotations

import pytest

from weir.commands.completion import matching


@pytest.mark.parametrize(
    ("names", "incomplete", "offered"),
    [
        (["b", "a", "b"], "", ["a", "b"]),
        (["ocr", "ocr_det", "magika"], "ocr", ["ocr", "ocr_det"]),
        (["v1.5+x@y", "größe"], "", ["größe", "v1.5+x@y"]),
        (["$(reboot)", "a b", "a;b", "'a'", "a\nb", "-rf", "", "a`b`", "*"], "", []),
    ],
)
def test_names_that_begin_so_and_that_shells_take_literally(
    names: list[str], incomplete: str, offered: list[str]
) -> None:
    assert matching(names, incomplete) == offered
