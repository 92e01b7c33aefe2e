"""`lean_environment`: a process with it sees the packages of `pip install 'weir-serve[EXTRA]'` alone, in this environment.

Other packages are hidden by a finder that `sitecustomize` puts in the place of Python's own.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]

_HIDE = """
import re
import sys
from importlib.machinery import PathFinder


class Lean(PathFinder):
    "Finds only what is not hidden: modules, and the descriptions of installed packages."

    modules = frozenset({modules})
    packages = frozenset({packages})

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.modules else PathFinder.find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context):
        for found in PathFinder.find_distributions(*context):
            if re.sub("[-_.]+", "-", found.metadata["Name"]).lower() not in cls.packages:
                yield found


sys.meta_path[sys.meta_path.index(PathFinder)] = Lean
"""


def installed_by(requirement: str) -> set[str]:
    """The distributions that `requirement` installs here, by their canonical names. Those that are absent are left out."""
    found: set[str] = set()
    waiting = [Requirement(requirement)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        key = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            waiting += _requirements(wanted)
        except PackageNotFoundError:
            continue
        found.add(key[0])
    return found


def _requirements(wanted: Requirement) -> list[Requirement]:
    if wanted.name == "weir-serve":  # as the checkout has it: what is installed may be older
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        inner = [one for extra in wanted.extras for one in project["optional-dependencies"][extra]]
        return [Requirement(one) for one in (*project["dependencies"], *inner)]
    return [one for one in map(Requirement, distribution(wanted.name).requires or ()) if _applies(one, wanted.extras)]


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def lean_environment(folder: Path, requirement: str = "weir-serve[cpu]") -> dict[str, str]:
    """The variables, for a process whose environment has them, that hide all packages but those of `requirement`."""
    kept = installed_by(requirement)
    owners = {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}
    modules = {module for module, names in owners.items() if module.isidentifier() and not kept & names}
    packages = set().union(*owners.values()) - kept
    (folder / "sitecustomize.py").write_text(_HIDE.format(modules=sorted(modules), packages=sorted(packages)))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
