"""Hooks of the documentation site: README.md is its home page, links out of docs/ lead to the repository, and its logo and
colours are those of the console.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LOGO = "assets/weir.svg"
COLOURS = "assets/colours.css"
_WEB = ROOT / "weir" / "console" / "web"
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md as index.md, with its links relative to docs/, and the console's logo and colours."""
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=with_relative_links(readme, config["repo_url"])))
    files.append(File.generated(config, LOGO, content=(_WEB / "weir.svg").read_text()))
    files.append(File.generated(config, COLOURS, content=site_colours()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to files outside of docs/ into links to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def to_repository(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        if path.startswith("docs/"):
            return match[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config['repo_url']}/{kind}/main/{path}{match[2] or ''})"

    return _LINK.sub(to_repository, markdown)


def with_relative_links(readme: str, repository: str) -> str:
    """The README as a page of docs/. Its links are absolute, because PyPI shows it too; pictures have another host."""
    raw = repository.replace("//github.com/", "//raw.githubusercontent.com/")
    of_tree = re.compile(rf"\]\((?:{re.escape(repository)}/(?:blob|tree)|{re.escape(raw)})/main/([^)\s]+)\)")

    def from_docs(match: re.Match[str]) -> str:
        path = match[1]
        return f"]({path.removeprefix('docs/') if path.startswith('docs/') else f'../{path}'})"

    return of_tree.sub(from_docs, readme)


def site_colours() -> str:
    """The console's colours under its own names, where the theme of the site is dark too."""
    colours = (_WEB / "styles" / "colours.css").read_text()
    return colours.replace(':root[data-theme="dark"]', '[data-md-color-scheme="slate"]')
