"""Installs the npm packages of the web pages, and copies the files that the pages load into the source tree.

    python -m weir.console.npm.copy_files [--npm COMMAND ...]

The copies are build products: git ignores them, and wheels contain them. Nothing is loaded from the network when a page is
open. `npm ci` checks each package against the hash in package-lock.json, and runs no script of a package.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]

CONSOLE, API_PAGE = "weir/console/web/vendor", "gateway/http/openapi/vendor"

FILES = {
    "echarts/dist/echarts.esm.min.mjs": CONSOLE,
    "htm/dist/htm.mjs": CONSOLE,
    "preact/dist/preact.mjs": CONSOLE,
    "preact/hooks/dist/hooks.mjs": CONSOLE,
    "tabulator-tables/dist/js/tabulator_esm.min.mjs": CONSOLE,
    "tabulator-tables/dist/css/tabulator_simple.min.css": CONSOLE,
    "swagger-ui-dist/swagger-ui-bundle.js": API_PAGE,
    "swagger-ui-dist/swagger-ui.css": API_PAGE,
}
"""The folder of the source tree for each file of an npm package."""

LICENSES = {
    "echarts/LICENSE": CONSOLE,
    "echarts/NOTICE": CONSOLE,
    "htm/LICENSE": CONSOLE,
    "preact/LICENSE": CONSOLE,
    "tabulator-tables/LICENSE": CONSOLE,
    "swagger-ui-dist/LICENSE": API_PAGE,
    "swagger-ui-dist/NOTICE": API_PAGE,
}
"""The licences of those packages. A copy has the package's name in front: `echarts-LICENSE`."""


def copy_files(npm: Sequence[str], root: Path = ROOT) -> list[Path]:
    """Installs the packages with the command `npm`, and returns the paths of the copies below `root`.

    Raises OSError or subprocess.CalledProcessError if npm can't be run or fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(Path(__file__).with_name(name), folder)
        subprocess.run([*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True)
        packages = Path(folder, "node_modules")
        for vendor in {*FILES.values()}:
            shutil.rmtree(root / vendor, ignore_errors=True)
            (root / vendor).mkdir(parents=True)
        copies = []
        for file, vendor in FILES.items():
            copies.append(root / vendor / Path(file).name)
            shutil.copyfile(packages / file, copies[-1])
        for file, vendor in LICENSES.items():
            copies.append(root / vendor / file.replace("/", "-"))
            shutil.copyfile(packages / file, copies[-1])
        return copies


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Copy the libraries of Weir's web pages into the source tree.")
    parser.add_argument("--npm", nargs="+", default=["npm"], metavar="COMMAND", help="the command that runs npm")
    for copy in copy_files(parser.parse_args().npm):
        print(f"{copy.relative_to(ROOT)}  {copy.stat().st_size} bytes")


if __name__ == "__main__":
    main()
