"""The distribution is called weir-serve: `weir` on PyPI is another project, which no text may tell users to install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from weir.commands.doctor.cuda_packages import cuda_major

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

SHOWN = sorted(
    path
    for pattern in ("*.md", "Makefile", "*/*.md", "*/**/*.py", "compose/**/*", "k8s/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and path != Path(__file__) and not path.relative_to(ROOT).parts[0].startswith((".", "CHANGELOG"))
)
"""All that a user may read: pages, messages in the code, manifests."""

_EXTRAS = re.compile(r"\bweir(-serve)?\[([a-z0-9,]+)\]")
_INSTALLED = re.compile(r"pip install (?:-\S+ )*'?weir\b(?!-serve)")


def test_its_name_and_its_command() -> None:
    assert PROJECT["name"] == "weir-serve"
    assert set(PROJECT["scripts"]) == {"weir"}


def test_texts_name_extras_that_there_are() -> None:
    named = {path: _EXTRAS.findall(path.read_text(errors="replace")) for path in [*SHOWN, ROOT / "pyproject.toml"]}
    assert {str(path) for path, found in named.items() if any(not serve for serve, _ in found)} == set()
    extras = {extra for found in named.values() for _, extras in found for extra in extras.split(",")}
    assert {"cpu", "gpu", "torch"} <= extras <= PROJECT["optional-dependencies"].keys()


def requirements(extra: str) -> list[Requirement]:
    """What an extra installs, with what the extras that it names install."""
    found = list(map(Requirement, PROJECT["optional-dependencies"][extra]))
    inner = [name for one in found if one.name == "weir-serve" for name in one.extras]
    return [one for one in found if one.name != "weir-serve"] + [one for name in inner for one in requirements(name)]


@pytest.mark.parametrize("extra", [name for name in PROJECT["optional-dependencies"] if name not in ("dev", "demo")])
def test_an_extra_is_for_one_major_version_of_cuda(extra: str) -> None:
    majors = set()
    for one in requirements(extra):
        (lowest,) = [limit.version for limit in one.specifier if limit.operator == ">="]
        major = cuda_major(one.name, lowest)
        if major is not None:
            majors.add(major)
            if not one.name.endswith(f"-cu{major}"):
                assert not one.specifier.contains(f"{major + 1}.0"), f"{one} may be another version's"
    assert majors <= {12 if extra.endswith("12") else 13}
    bindings = [one for one in requirements(extra) if one.name == "cuda-bindings"]
    assert not any(one.specifier.contains("12.9.0") for one in bindings)


def test_no_text_says_to_install_the_other_project() -> None:
    assert [str(path) for path in SHOWN if _INSTALLED.search(path.read_text(errors="replace"))] == []
