"""`grave_barriers`: what axe-core finds on a page that keeps people out who use a keyboard, a screen reader or large type.

axe-core is an npm package that `make test` installs; tests are skipped where it is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

AXE = Path(sys.prefix) / "accessibility" / "node_modules" / "axe-core" / "axe.min.js"

needs_axe = pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed (make test)")

_RUN = """async () => {
    const options = {resultTypes: ['violations'], rules: {'label-content-name-mismatch': {enabled: true}}};
    const found = await axe.run(document, options);
    return {
        passed: found.passes.length,
        violations: found.violations.map(({id, impact, nodes}) => ({id, impact, targets: nodes.map((node) => node.html)})),
    };
}"""
"""All rules that are on by default, and that a control's name has the text that is seen on it."""

_GRAVE = ("serious", "critical")


def grave_barriers(page: Page) -> dict[str, list[str]]:
    """The elements in which axe-core finds something of level serious or critical, by its rule, as the page is now."""
    if not page.evaluate("typeof window.axe === 'object'"):
        page.evaluate(AXE.read_text())
    found = page.evaluate(_RUN)
    assert found["passed"] > 10, "axe-core has looked at the page"
    return {one["id"]: one["targets"] for one in found["violations"] if one["impact"] in _GRAVE}
