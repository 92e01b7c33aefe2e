"""Make a folder of small files of several kinds, as input of an offline job.

    python -m examples.batch.make_files FOLDER [--count=10000]

The same count always makes the same files, a thousand to a folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

FILES_OF_A_FOLDER = 1000

_WORDS = ["weir", "river", "sluice", "water", "dam", "gauge", "flood", "stream", "mill", "bridge", "canal", "lock"]


def files(count: int) -> Iterator[tuple[str, str]]:
    """(path, content) of each of `count` files."""
    kinds = [("py", _python), ("json", _json), ("csv", _csv), ("html", _html), ("sh", _shell)]
    for number in range(count):
        suffix, write = kinds[number % len(kinds)]
        yield f"{number // FILES_OF_A_FOLDER:04}/{number:07}.{suffix}", write(number)


def make_files(folder: Path, count: int) -> None:
    """Write `count` files below `folder`."""
    for path, content in files(count):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, "utf-8")


def _word(number: int) -> str:
    return _WORDS[number % len(_WORDS)]


def _python(number: int) -> str:
    name = _word(number)
    return (
        f'import math\n\n\ndef {name}(level):\n    """How much flows over."""\n    return math.sqrt(level) * {number}\n'
        * 4
    )


def _json(number: int) -> str:
    return json.dumps({"number": number, "words": [_word(number + step) for step in range(20)]}, indent=2)


def _csv(number: int) -> str:
    rows = (f"{number + row},{_word(number + row)},{row / 7:.3f}\n" for row in range(30))
    return "number,word,level\n" + "".join(rows)


def _html(number: int) -> str:
    rows = "".join(f"<p>{_word(number + row)}</p>\n" for row in range(20))
    return f"<!DOCTYPE html>\n<html><head><title>{number}</title></head>\n<body>\n{rows}</body></html>\n"


def _shell(number: int) -> str:
    return "#!/bin/sh\nset -e\n" + "".join(f'echo "{_word(number + row)}" >> out.txt\n' for row in range(20))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    chosen = parser.parse_args()
    make_files(chosen.folder, chosen.count)
