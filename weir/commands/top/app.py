"""`TopApp`: the screens of `weir top`: the table of models, and one model."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static

from weir.cluster.rates import Key, Rates
from weir.cluster.status.snapshot import ClusterStatus
from weir.commands.terminal import one_line
from weir.commands.top.details import detail_lines
from weir.commands.top.rows import (
    COLUMNS,
    TABLE_WIDTH,
    ModelRow,
    cut_name,
    duration_text,
    filter_rows,
    number_text,
    problems_text,
    roles_text,
    rows_of,
    sort_rows,
    totals_text,
)
from weir.console.history.series import Values
from weir.schemas.core.names import plain_name

HISTORY_S = 120
"""How much of a model's past its lines show."""

_STATES = {"ready": "green", "partly": "yellow", "loads": "yellow", "down": "red", "zero": "dim"}
_LEVELS = {"healthy": "bold green", "degraded": "bold yellow", "down": "bold red", "unreachable": "bold red"}
_BUSY = 0.9


class Source(Protocol):
    """Where the numbers come from."""

    place: str
    """The broker's address."""

    def models(self) -> dict[str, Values]:
        """The load of each model by its identity; empty before the second reading."""

    def cluster(self) -> Values:
        """The load of all models and hosts."""

    def versions(self) -> dict[Key, Rates]:
        """The rates of each version."""

    def status(self) -> ClusterStatus | None:
        """The state of the cluster, None until it is known."""

    def history(self, model: str, since_ms: int) -> dict[str, list[Any]]:
        """The load of a model by column, since a unix time; `at_ms` has the times."""


class TopApp(App[None]):
    """Shows what `source` has. `refresh_load` and `refresh_status` are called whenever that is new."""

    TITLE = "weir top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    #head { height: auto; padding: 0; }
    DataTable { background: ansi_default; scrollbar-size-vertical: 1; overflow-x: hidden; height: 1fr; }
    Input { display: none; height: 1; border: none; padding: 0; }
    Input.shown { display: block; }
    Sparkline { height: 2; }
    #facts { height: auto; }
    """

    def __init__(self, source: Source, **options: Any) -> None:
        super().__init__(**options)
        self.source = source
        self.is_paused = False

    def on_mount(self) -> None:
        """Shows the table of models."""
        self.push_screen(ModelsScreen())

    def refresh_load(self) -> None:
        """There is new data: the screen in front shows it, unless the user has paused it."""
        if not self.is_paused and self.is_running and isinstance(self.screen, _LiveScreen):
            self.screen.show()


class _LiveScreen(Screen[None]):
    """A screen that shows the source of its application."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "pause", "Pause"), Binding("q", "app.quit", "Quit")]

    @property
    def source(self) -> Source:
        """What it shows."""
        app = self.app
        assert isinstance(app, TopApp)  # noqa: S101 - it belongs to no other application
        return app.source

    def show(self) -> None:
        """Shows the latest data."""

    def on_screen_resume(self) -> None:
        """Shows the latest data when it is in front again."""
        self.show()

    def on_resize(self, _event: Resize) -> None:
        """Fits the latest data to the new size."""
        self.show()

    def action_pause(self) -> None:
        """Stops or continues to show new data."""
        app = self.app
        assert isinstance(app, TopApp)  # noqa: S101 - as above
        app.is_paused = not app.is_paused
        self.show()

    @property
    def _width(self) -> int:
        return max(20, self.size.width)

    def _head(self) -> Text:
        """The first lines: where, how much, and what is wrong."""
        app = self.app
        paused = "  PAUSED" if isinstance(app, TopApp) and app.is_paused else ""
        status = self.source.status()
        clock = time.strftime("%H:%M:%S")
        first = f"weir top  {one_line(self.source.place)}  {roles_text(status)}{paused}"
        room = self._width - len(clock) - 1
        head = Text(first[:room].ljust(room), style="bold", no_wrap=True).append(f" {clock}\n", style="dim")
        head.append(totals_text(self.source.cluster(), status)[: self._width] + "\n")
        lines = problems_text(status, self._width)
        head.append(lines[0], style=_LEVELS.get(status.state, "") if status is not None else "dim")
        for line in lines[1:]:
            head.append(f"\n{line}")
        return head


class _ModelTable(DataTable[Text]):
    """A table of rows, whose key for opening one is shown."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Open")]


class ModelsScreen(_LiveScreen):
    """The table of all models."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,comma", "sort(-1)", "Sort", key_display="←"),
        Binding("right,full_stop", "sort(1)", "Sort", key_display="→"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "clear", "Clear", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.sorted_by = 1  # requests a second
        self.is_reversed = False
        self.filter = ""
        self._shown: list[ModelRow] = []
        self._widths: list[int] = []
        self._layout = (0, 0)  # the width and the sorted column that the titles are for
        self._drawn: dict[str, list[Text]] = {}

    def compose(self) -> ComposeResult:
        """The head, the table and the keys."""
        yield Static(id="head")
        yield Input(placeholder="part of a name, or a state", id="filter")
        yield _ModelTable(cursor_type="row", cell_padding=0)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Moves the focus to the table."""
        self._table.focus()
        self.show()

    @property
    def _table(self) -> _ModelTable:
        return self.query_one(_ModelTable)

    def show(self) -> None:
        """Shows the rows, with the cursor on the model on which it was."""
        if not self.is_mounted:
            return
        self.query_one("#head", Static).update(self._head())
        rows = filter_rows(rows_of(self.source.models(), self.source.status()), self.filter)
        self._shown = sort_rows(rows, self.sorted_by, self.is_reversed)
        keys = [row.key for row in self._shown]
        has_new_columns = self._layout != (self._width, self.sorted_by)
        if has_new_columns or keys != list(self._drawn):
            self._draw(keys, has_new_columns)
        else:
            self._draw_changes()

    def _draw(self, keys: list[str], has_new_columns: bool) -> None:
        """Draws all rows, with the cursor on the model on which it was."""
        table, chosen = self._table, self.chosen
        kept = table.scroll_y
        table.clear()
        if has_new_columns:
            self._set_columns(table)
        self._drawn = {row.key: self._cells(row) for row in self._shown}
        for key, cells in self._drawn.items():
            table.add_row(*cells, key=key)
        if chosen in keys:
            table.move_cursor(row=keys.index(chosen), animate=False, scroll=False)
        table.scroll_to(y=kept, animate=False)

    def _draw_changes(self) -> None:
        """Draws the cells that have changed: most models do nothing most of the time."""
        table = self._table
        for number, row in enumerate(self._shown):
            cells, before = self._cells(row), self._drawn[row.key]
            for place, (cell, old) in enumerate(zip(cells, before, strict=True)):
                if cell != old:
                    table.update_cell_at(Coordinate(number, place), cell)
            self._drawn[row.key] = cells

    @property
    def chosen(self) -> str:
        """The identity of the model under the cursor, "" without one."""
        table = self._table
        if not table.row_count or not table.is_valid_row_index(table.cursor_row):
            return ""
        return str(table.coordinate_to_cell_key((table.cursor_row, 0)).row_key.value)  # type: ignore[arg-type]

    def _set_columns(self, table: DataTable[Text]) -> None:
        """Sets the titles, with a mark at the one that rows are sorted by; the names get the room that is left."""
        more = max(0, self._width - TABLE_WIDTH - 1)
        widths = [COLUMNS[0].width + more, *(column.width for column in COLUMNS[1:])]
        table.clear(columns=True)
        for number, (column, width) in enumerate(zip(COLUMNS, widths, strict=True)):
            style = "bold reverse" if number == self.sorted_by else "bold"
            last = number == len(COLUMNS) - 1
            table.add_column(_aligned(column.title, width, column.is_text, style), width=width + (not last))
        self._widths = widths
        self._layout = self._width, self.sorted_by

    def _cells(self, row: ModelRow) -> list[Text]:
        texts = [cut_name(row.name, self._widths[0]), *(column.text(row) for column in COLUMNS[1:])]
        styles = dict.fromkeys((column.title for column in COLUMNS), "")
        styles["STATE"] = _STATES.get(row.state, "")
        styles["FAIL/S"] = "red"
        styles["USED"] = "yellow" if (row.utilization or 0) >= _BUSY else ""
        return [
            _aligned(text, width, column.is_text, styles[column.title])
            for text, width, column in zip(texts, self._widths, COLUMNS, strict=True)
        ]

    def action_sort(self, step: int) -> None:
        """Sorts by the next column, or the one before."""
        self.sorted_by = (self.sorted_by + step) % len(COLUMNS)
        self.is_reversed = False
        self.show()

    def action_reverse(self) -> None:
        """Turns the order round."""
        self.is_reversed = not self.is_reversed
        self.show()

    def action_filter(self) -> None:
        """Opens the line for the filter."""
        line = self.query_one(Input)
        line.add_class("shown")
        line.focus()

    def action_clear(self) -> None:
        """Shows all models again."""
        self.query_one(Input).value = ""
        self._end_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters while the user types."""
        self.filter = event.value
        self.show()

    def on_input_submitted(self) -> None:
        """Keeps the filter, and moves the focus back to the table."""
        self._end_filter()

    def _end_filter(self) -> None:
        line = self.query_one(Input)
        if not line.value:
            line.remove_class("shown")
        self._table.focus()

    def on_data_table_row_selected(self) -> None:
        """Opens the model under the cursor."""
        if chosen := self.chosen:
            self.app.push_screen(ModelScreen(chosen))


class ModelScreen(_LiveScreen):
    """One model: lines of its last minutes, versions, queues and workers."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,left,backspace", "app.pop_screen", "Back")]

    LINES: ClassVar[dict[str, tuple[str, str]]] = {
        "requests_per_s": ("requests/s", ""),
        "p99_ms": ("p99", " ms"),
        "queue_depth": ("queue", ""),
    }
    """The columns of the history that are drawn, with their titles and units."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model

    def compose(self) -> ComposeResult:
        """The head, three lines, the facts and the keys."""
        yield Static(id="head")
        yield Static(Text(one_line(plain_name(self.model)), style="bold reverse"), id="name")
        with VerticalScroll():
            for column in self.LINES:
                yield Static(id=f"title-{column}")
                yield Sparkline([0.0], id=f"line-{column}", summary_function=max)
            yield Static(id="facts")
        yield Footer(compact=True)

    def show(self) -> None:
        """Shows the latest facts and the last two minutes."""
        if not self.is_mounted:
            return
        self.query_one("#head", Static).update(self._head())
        since_ms = int(time.time() * 1000) - HISTORY_S * 1000
        past = self.source.history(self.model, since_ms)
        for column, (title, unit) in self.LINES.items():
            values = [float(value or 0.0) for value in past.get(column, ())]
            form = duration_text if unit else number_text
            latest, largest = (form(values[-1]), form(max(values))) if values else ("", "")
            text = f"{title} now {latest or '0'}{unit}, most {largest or '0'}{unit} in {HISTORY_S} s"
            self.query_one(f"#title-{column}", Static).update(text)
            self.query_one(f"#line-{column}", Sparkline).data = values or [0.0]
        facts = detail_lines(self.model, self.source.versions(), self.source.status(), self._width)
        self.query_one("#facts", Static).update(Text("\n".join(facts), no_wrap=True))


def _aligned(text: str, width: int, is_text: bool, style: str) -> Text:
    return Text(text.ljust(width) if is_text else text.rjust(width), style=style, no_wrap=True)
