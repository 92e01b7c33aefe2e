"""The key that commands show to a gateway: where it comes from, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weir.options import UsageError
from weir.options.api_key import authorization


def test_a_key_comes_from_the_file_else_from_the_variable(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("weir_abc\n")
    file = f"@{tmp_path}/key"
    assert authorization("", {}) == {}
    assert authorization(file, {}) == {"Authorization": "Bearer weir_abc"}
    assert authorization("", {"WEIR_API_KEY": "k"}) == {"Authorization": "Bearer k"}
    assert authorization("", {"WEIR_API_KEY": file}) == {"Authorization": "Bearer weir_abc"}
    assert authorization(file, {"WEIR_API_KEY": "k"}) == {"Authorization": "Bearer weir_abc"}
    assert "weir_abc" not in repr(authorization(file, {}))


@pytest.mark.parametrize(
    ("option", "variable", "reason"),
    [
        ("hush", "", "--api-key takes @FILE"),
        ("@@hush", "", "--api-key takes @FILE"),
        ("@/nowhere", "", "--api-key: /nowhere can't be read"),
        ("", "@/nowhere", "WEIR_API_KEY: /nowhere can't be read"),
        ("", "hush\nX-Other: 1", "WEIR_API_KEY holds no key"),
        ("", "hüsh", "WEIR_API_KEY holds no key"),
        ("", "Bearer hush", "WEIR_API_KEY holds no key"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(option: str, variable: str, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)) as error:
        authorization(option, {"WEIR_API_KEY": variable})
    assert "hush" not in str(error.value)
