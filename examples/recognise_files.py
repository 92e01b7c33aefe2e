"""Recognise which kinds of file some files are, with models `file_features` and `magika`.

    python -m examples.recognise_files [--url=localhost:8000] [--grpc-url=localhost:8001] [file ...]

Without files, some of this checkout and of Python are recognised. The requests are in weir/demo/files.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from weir.demo.files import files, recognised_files


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--url", default="localhost:8000", help="where the server speaks HTTP")
    parser.add_argument("--grpc-url", default="localhost:8001", help="where the server speaks gRPC")
    arguments = parser.parse_args()
    chosen = [(str(path), path) for path in arguments.files] or list(files())
    Console(highlight=False).print(recognised_files(arguments.url, arguments.grpc_url, chosen))


if __name__ == "__main__":
    main()
