"""benchmarks/README.md has one row for each benchmark, and names no command that does not exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROWS = set(
    re.findall(r"`?python -m ((?:benchmarks|tests\.faults)[\w.]*)", (ROOT / "benchmarks" / "README.md").read_text())
)


def commands(folder: str) -> set[str]:
    """The modules of `folder` that run as commands."""
    found = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for file in (ROOT / folder).rglob("*.py")
        if file.name == "__main__.py" or '__name__ == "__main__"' in file.read_text()
    }
    # Parts that the commands themselves start, or that `make` runs.
    return found - {"benchmarks.durable.flood", "benchmarks.gpu.bundle", "benchmarks.gpu.check"}


def test_each_benchmark_has_a_row() -> None:
    assert {row for row in ROWS if row.startswith("benchmarks.")} == commands("benchmarks")


def test_each_long_run_of_the_fault_suite_exists() -> None:
    assert {row for row in ROWS if row.startswith("tests.")} <= commands("tests/faults")
