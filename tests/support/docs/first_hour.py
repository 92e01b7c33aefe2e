"""The parts of docs/first-hour.md: its commands in the order of its two terminals, and the files that it has one write."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.docs.pages import FIRST_HOUR, ROOT, all_blocks

TEMPLATE = "weir init --template python --name my"
"""The page's way to a model without a file."""


def scripts() -> tuple[str, str, str, str]:
    """The scripts that install, make the model, serve it, and do the rest in the second terminal."""
    install, make, serve, *rest = [
        block.text for block in all_blocks() if (block.page, block.language) == (FIRST_HOUR, "sh")
    ]
    return install, make, serve.strip(), "".join(rest)


def write_programs(folder: Path) -> None:
    """Writes each Python block to `folder`, under the name that the page gives it."""
    text = (ROOT / FIRST_HOUR).read_text()
    programs = re.findall(r"Write this to `(\w+\.py)`[^`]*?```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(programs) == text.count("```py\n")
    for name, program in programs:
        (folder / name).write_text(program)
