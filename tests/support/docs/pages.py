"""The fenced code blocks of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
PAGES = (
    "README.md",
    "examples/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)

EVENTS = "docs/events.md"
"""Its `sh` blocks are whole scripts: test_events.py runs them as such."""

MANAGED_SERVICES = ("docs/sagemaker.md", "docs/vertex-ai.md")
"""Their commands need a server of their own: test_managed_services.py runs them."""

REPOSITORIES = "docs/repositories.md"
"""Its commands need object stores: test_repositories.py runs them."""

SECURITY = "docs/security.md"
"""Its commands build on each other, on a server with TLS: test_security.py runs them."""

INIT = "docs/init.md"
"""Its commands need files of models: test_init.py runs them."""

FIRST_HOUR = "docs/first-hour.md"
"""Its commands build on each other: test_first_hour.py runs them."""

SECURITY = "docs/security.md"
"""Its commands build on each other: test_security_keys.py runs them."""

OWN_MODEL = ("weir ", "curl -s http://localhost:8000/v2/models/my/")
"""Commands of the README for a model of one's own, which are among those of FIRST_HOUR."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block: its page, its language, and its lines."""

    page: str
    language: str
    text: str


def blocks(language: str) -> list[Block]:
    """The blocks of one language, page by page, in order."""
    return [block for block in all_blocks() if block.language == language]


def all_blocks() -> list[Block]:
    return [Block(page, *found) for page in PAGES for found in _FENCE.findall((ROOT / page).read_text())]


def commands() -> list[tuple[str, str]]:
    """(page, command) of each line of each `sh` block, but for pages that other tests run."""
    return [
        (block.page, line)
        for block in blocks("sh")
        if block.page not in (EVENTS, FIRST_HOUR, INIT, SECURITY, *MANAGED_SERVICES)
        for line in block.text.splitlines()
        if line.strip()
    ]
