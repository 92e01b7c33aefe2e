"""Tables of the GPU benchmarks: kept as JSON for each section, and written together as a page of Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

TITLE = "# Runs: GPUs"

INTRODUCTION = """Written by `make gpu-check` on {machine}, {date}. Every row has the bare engine and the server in one
run, on one machine; only ratios within a row compare with other machines. `python -m benchmarks.gpu --sections NAME`
measures one section again."""


@dataclass(slots=True)
class Section:
    """One table: `columns` and rows of as many texts, `about` above it, `notes` below it. `pictures` are files of SVG."""

    name: str
    title: str
    about: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Adds a row, and prints it: a run that is cut short has shown what it found."""
        row = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
        if len(row) != len(self.columns):
            raise ValueError(f"section '{self.name}': {len(row)} cells for {len(self.columns)} columns")
        self.rows.append(row)
        print(f"{self.name}: " + ", ".join(map(" ".join, zip(self.columns, row, strict=True))), flush=True)

    def note(self, text: str) -> None:
        """Adds a sentence below the table, and prints it."""
        self.notes.append(text)
        print(f"{self.name}: {text}", flush=True)

    @property
    def markdown(self) -> str:
        """The section as Markdown."""
        lines = [f"## {self.title}", "", self.about, ""]
        if self.rows:
            lines += ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
            lines += ["| " + " | ".join(row) + " |" for row in self.rows] + [""]
        for picture in self.pictures:
            lines += [f"![{self.title}](../pictures/{picture})", ""]
        for note in self.notes:
            lines += [note, ""]
        return "\n".join(lines)


class Results:
    """The sections that were measured, in `folder`, where a later run finds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        """Whether the section was measured by this run or an earlier one."""
        return self._file(name).is_file()

    def keep(self, section: Section) -> None:
        """Stores a section."""
        self._file(section.name).write_text(json.dumps(asdict(section), indent=1))

    def write(self, names: Sequence[str], machine: str, date: str) -> Path:
        """Writes the page with those of the sections that there are, in this order; returns its path."""
        sections = [Section(**json.loads(self._file(name).read_text())) for name in names if self.has(name)]
        missing = [name for name in names if not self.has(name)]
        parts = [TITLE, "", INTRODUCTION.format(machine=machine, date=date), ""]
        parts += [section.markdown for section in sections]
        if missing:
            parts.append(f"Not measured in this run: {', '.join(missing)}.\n")
        page = self._folder / "gpu.md"
        page.write_text("\n".join(parts))
        return page

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"
