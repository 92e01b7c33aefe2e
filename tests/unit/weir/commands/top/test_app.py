"""The screens of `weir top`, driven by keys at 80 columns, and the picture of its page."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input

from tests.support.docs.pages import ROOT
from tests.support.top_source import GivenSource
from weir.commands.top.app import ModelScreen, ModelsScreen, TopApp

PICTURE = ROOT / "docs" / "pictures" / "top.svg"


@asynccontextmanager
async def running(source: GivenSource, columns: int = 80, rows: int = 24) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    app = TopApp(source)
    async with app.run_test(size=(columns, rows)) as pilot:
        await pilot.pause()
        while not screen_lines(app)[-1].strip():  # the footer gets its keys after the first refresh
            await pilot.pause()
        yield app, pilot


def shown(app: TopApp) -> list[list[str]]:
    """The cells of the table, row by row."""
    table = app.screen.query_one(DataTable)
    return [[str(cell).strip() for cell in table.get_row_at(row)] for row in range(table.row_count)]


def names(app: TopApp) -> list[str]:
    return [row[0] for row in shown(app)]


def screen_lines(app: TopApp) -> list[str]:
    """What stands on the screen."""
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


async def test_the_busiest_model_comes_first_with_its_numbers() -> None:
    async with running(GivenSource()) as (app, _):
        assert shown(app)[0] == ["recognise_text", "400", "", "0.80", "3.10", "40", "120", "7.40", "95%", "2", "ready"]
        assert names(app)[-1] == "rarely_used"
        assert shown(app)[-1][-1] == "zero"


async def test_each_column_sorts_and_reverses() -> None:
    async with running(GivenSource()) as (app, pilot):
        await pilot.press("right", "right", "right")
        assert names(app)[0] == "file_features", "the slowest by p99"
        await pilot.press("r")
        assert names(app)[0] == "recognise_text"
        await pilot.press("left", "left", "left", "left")
        assert names(app) == sorted(names(app))
        await pilot.press("left")
        assert shown(app)[0][-1] == "ready"


async def test_a_filter_leaves_what_it_names_and_escape_clears_it() -> None:
    async with running(GivenSource()) as (app, pilot):
        await pilot.press("slash", *"ma")
        assert names(app) == ["magika"]
        await pilot.press("enter")
        assert isinstance(app.focused, DataTable)
        await pilot.press("escape")
        assert len(names(app)) == 6
        assert app.screen.query_one(Input).value == ""


async def test_the_cursor_stays_on_its_model_when_the_order_changes() -> None:
    source = GivenSource()
    async with running(source) as (app, pilot):
        await pilot.press("down", "down")
        screen = app.screen
        assert isinstance(screen, ModelsScreen)
        assert screen.chosen == "magika"
        source.load["magika"] = {**source.load["magika"], "requests_per_s": 9000.0}
        app.refresh_load()
        await pilot.pause()
        assert names(app)[0] == "magika"
        assert screen.chosen == "magika"


async def test_a_model_opens_with_its_versions_queues_and_lines() -> None:
    async with running(GivenSource(), rows=40) as (app, pilot):
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, ModelScreen)
        text = "\n".join(screen_lines(app))
        assert re.search(r"1 READY +75% +2 +1 +2 +300 +0.70 +2.90 +7.90", text)
        assert re.search(r"2 READY +25%", text)
        assert re.search(r"0 scheduler-1f2e-7 +40 +0 +\? +120 +44", text)
        assert "2 workers, its load needs 2" in text
        assert re.search(r"requests/s now 395, most 395 in 120 s", text)
        await pilot.press("escape")
        assert isinstance(app.screen, ModelsScreen)


async def test_a_pause_keeps_what_is_shown() -> None:
    source = GivenSource()
    async with running(source) as (app, pilot):
        await pilot.press("space")
        source.load = {}
        app.refresh_load()
        await pilot.pause()
        assert shown(app)[0][1] == "400"
        assert "PAUSED" in "\n".join(screen_lines(app))
        await pilot.press("space")
        assert shown(app)[0][1] == ""


async def test_a_lost_broker_is_shown() -> None:
    source = GivenSource()
    async with running(source) as (app, pilot):
        assert source.state is not None
        source.state = source.state.model_copy(update={"state": "unreachable", "error": "no NATS server answers"})
        app.refresh_load()
        await pilot.pause()
        assert "unreachable: no NATS server answers" in "\n".join(screen_lines(app))


@pytest.mark.parametrize("columns", [80, 120])
async def test_nothing_is_cut_off(columns: int) -> None:
    async with running(GivenSource(), columns) as (app, _):
        lines = screen_lines(app)
        titles = next(line for line in lines if "REQ/S" in line)
        assert titles.rstrip().endswith("STATE")
        row = next(line for line in lines if line.startswith("recognise_text "))
        assert row.rstrip().endswith("ready")
        keys = lines[-1]
        assert all(word in keys for word in ("Pause", "Quit", "Sort", "Reverse", "Filter", "Open"))


async def test_names_are_text_and_no_markup() -> None:
    source = GivenSource()
    source.load["[red]x[/red]\x1b[2J"] = {"requests_per_s": 9999.0}
    async with running(source, 120) as (app, _):
        assert names(app)[0] == "[red]x[/red]?[2J"


async def test_quit_ends_it() -> None:
    async with running(GivenSource()) as (app, pilot):
        await pilot.press("q")
        assert app._exit


async def test_the_picture_of_the_page_is_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn where it is missing: remove docs/pictures/top.svg to draw it again."""
    monkeypatch.setattr("weir.commands.top.app.time.strftime", lambda _: "12:34:56")
    async with running(GivenSource(), rows=14) as (app, _):
        drawn = _without_fonts(app.export_screenshot(title="weir top"))
    if not PICTURE.exists():
        PICTURE.write_text(drawn)
    assert _texts(PICTURE.read_text()) == _texts(drawn)


def _texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def _without_fonts(svg: str) -> str:
    """The picture without the addresses of fonts: a page loads nothing from elsewhere."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
