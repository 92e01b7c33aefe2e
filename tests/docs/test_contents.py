"""Pages that list others have them all, and pages about others say from where they know."""

from __future__ import annotations

import re

from tests.support.docs.pages import PAGES, ROOT


def test_the_contents_have_each_page_for_a_task() -> None:
    text = (ROOT / "docs" / "contents.md").read_text()
    pages = [page.removeprefix("docs/") for page in PAGES if re.fullmatch(r"docs/[\w-]+\.md", page)]
    assert [page for page in pages if f"]({page})" not in text and page != "contents.md"] == []


def test_each_server_that_is_compared_has_a_source_a_date_and_a_reason_to_take_it() -> None:
    text = (ROOT / "docs" / "compared.md").read_text()
    servers = {
        part.splitlines()[0]: part for part in text.partition("## One by one")[2].partition("\n## ")[0].split("\n### ")
    }
    del servers[""]
    assert len(servers) == 10
    for name, part in servers.items():
        assert re.search(r"\]\(https://", part), name
        assert re.search(r"\b20\d\d\b", part), name
        assert "**Take it**" in part, name
