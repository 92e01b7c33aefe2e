"""Read the text in pictures, with the ensemble `ocr`.

    python -m examples.read_picture [--url=localhost:8000] [picture.png ...]

Without pictures, one is rendered that has three lines of text. The requests are in weir/demo/pictures.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from tritonclient import http

from weir.demo.pictures import LINES, lines_table, read, rendered


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", type=Path, help="PNG, JPEG and the like")
    parser.add_argument("--url", default="localhost:8000", help="where the server speaks HTTP")
    arguments = parser.parse_args()
    pictures = {path.name: path.read_bytes() for path in arguments.pictures} or {"a rendered picture": rendered(LINES)}
    with http.InferenceServerClient(arguments.url) as client:
        for name, picture in pictures.items():
            Console(highlight=False).print(lines_table(name, read(client, picture)))


if __name__ == "__main__":
    main()
