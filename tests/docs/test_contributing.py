"""CONTRIBUTING.md names files, folders and make targets that exist, and where a newcomer's additions go."""

import re

import pytest

from tests.support.docs.pages import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = sorted(
    path
    for path in set(re.findall(r"`([\w./<>-]+/[\w./<>-]*)`", TEXT)) | set(re.findall(r"`(\w+\.(?:md|toml))`", TEXT))
    if not path.startswith((".venv", "http"))
)


def test_there_is_a_section_for_each_addition() -> None:
    assert re.findall(r"^### (.*)$", TEXT, re.MULTILINE) == [
        "A backend",
        "A scheduler policy",
        "A route",
        "A metric",
        "An option",
        "A message on the bus",
    ]


@pytest.mark.parametrize("path", PATHS)
def test_a_named_path_exists(path: str) -> None:
    existing = path.partition("<")[0]
    folders = [ROOT, ROOT / "tests", ROOT / "weir" / "options"]
    assert any((folder / existing).exists() for folder in folders), path


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([\w-]+)`", TEXT))))
def test_a_named_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)", TEXT))))
def test_a_link_leads_to_a_file(link: str) -> None:
    assert (ROOT / link).is_file()


def test_the_exercise_names_what_exists() -> None:
    exercise = TEXT.partition("#### To begin with")[2].partition("### ")[0]
    code = " ".join((ROOT / path).read_text() for path in re.findall(r"`([\w/]+\.py)`", exercise))
    code += (ROOT / "scheduler/batching/version_queue.py").read_text()
    names = set(re.findall(r"`([A-Za-z_]+)[`(]", exercise)) - {"even_batches"}
    assert {"Queue", "Former", "DynamicFormer", "former_for", "FormedQueue", "next_batch"} <= names
    assert not {name for name in names if not re.search(rf"\b{name}\b", code)}
