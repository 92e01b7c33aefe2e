"""The README works where it is read without the repository, as on PyPI, and its first screen is true and short."""

from __future__ import annotations

import re
import tomllib

import pytest

from docs.site_hooks import with_relative_links
from tests.support.docs.pages import ROOT
from weir.options import options_of

TEXT = (ROOT / "README.md").read_text()
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
LINKS = re.findall(r"\]\(([^)\s]+)\)", TEXT)
FIRST_SCREEN, _, REST = TEXT.partition("\n## ")
MAX_LINES = 150


def in_tree(link: str) -> re.Match[str] | None:
    """The kind (blob, tree, or none for a picture), the path and the anchor of a link into the repository."""
    raw = REPOSITORY.replace("//github.com/", "//raw.githubusercontent.com/")
    pattern = rf"(?:{re.escape(REPOSITORY)}/(?P<kind>\w+)|{re.escape(raw)})/main/(?P<path>[^#]+)(?P<anchor>#.*)?"
    return re.fullmatch(pattern, link)


def test_no_link_is_relative() -> None:
    assert [link for link in LINKS if not link.startswith(("https://", "#"))] == []


def test_links_into_the_repository_lead_to_a_file_or_folder_of_it() -> None:
    leading = [found for found in map(in_tree, LINKS) if found is not None]
    assert len(leading) >= 20
    for found in leading:
        path = ROOT / found["path"]
        assert path.is_dir() if found["kind"] == "tree" else path.is_file(), found[0]


def test_links_on_this_page_lead_to_a_heading() -> None:
    headings = {
        re.sub(r"[^\w -]", "", title).replace(" ", "-").lower()
        for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    assert {link.removeprefix("#") for link in LINKS if link.startswith("#")} <= headings


def test_its_pages_and_pictures_are_those_of_the_site_there() -> None:
    page = with_relative_links(TEXT, REPOSITORY)
    assert "](performance.md)" in page
    assert "](pictures/tour-overview.png)" in page
    assert "](../LICENSE)" in page
    assert f"]({REPOSITORY}" not in page


def test_the_first_screen_has_a_picture_three_measured_figures_and_for_whom_it_is_not() -> None:
    assert len(FIRST_SCREEN.splitlines()) <= 20
    assert re.search(r"^!\[The console[^]]*\]\(https://", FIRST_SCREEN, re.MULTILINE)
    assert "](#when-not-to-use-weir)" in FIRST_SCREEN
    rows = re.findall(r"^\| (?:fast|durable|loses) .*$", FIRST_SCREEN, re.MULTILINE)
    assert len(rows) == 3


@pytest.mark.parametrize("row", re.findall(r"^\| (?:fast|durable|loses) .*$", FIRST_SCREEN, re.MULTILINE))
def test_a_figure_is_that_of_the_page_it_links(row: str) -> None:
    _, _, figure, command, _ = row.split("|")
    (link,) = re.findall(r"\]\(([^)]+)\)", figure)
    found = in_tree(link)
    assert found is not None
    page = (ROOT / found["path"]).read_text()
    numbers = re.findall(r"\d[\d .]*\d", figure.partition("](")[0].replace("64 requests", ""))
    assert numbers
    assert [number for number in numbers if number not in page] == []
    assert command.strip().strip("`") in page


def test_options_of_the_command_line_beside_tritons_exist() -> None:
    (line,) = re.findall(r"^weir serve   (.*)$", TEXT, re.MULTILINE)
    names = {name for option in options_of("serve").values() for name in option.names}
    assert {word.partition("=")[0] for word in line.split()} <= names


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= MAX_LINES
