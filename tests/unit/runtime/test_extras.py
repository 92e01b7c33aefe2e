"""The extras that a server can do without: they are in pyproject.toml, and Weir is imported without their packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.lean import ROOT, installed_by, lean_environment
from weir.runtime import extras
from weir.runtime.extras import EXTRAS, is_installed, missing_extra

OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

NEEDS_AN_EXTRA = {
    "weir.access.policy.document": "yaml",
    "weir.access.tokens.signing_keys": "jwt",
    "weir.access.tokens.verifier": "jwt",
    "weir.cluster.access.issuers": "jwt",
    "weir.cluster.access.key_sets": "jwt",
    "weir.commands.top.app": "textual",
    "weir.telemetry.tracing.span_export": "opentelemetry",
}
"""The modules that can't be imported without an extra, and what is missing. They are imported when they are needed."""

IMPORT_ALL = """
import importlib, pkgutil, weir
apart = ("weir.demo", "weir.console.npm", "weir.worker.python_stub", "weir.commands.init.templates", "weir.__main__")
apart += ("weir.pytest_plugin", "weir.testing", "weir.worker.backends.isolation.isolated_model")
for found in pkgutil.walk_packages(weir.__path__, "weir.", onerror=lambda name: None):
    if found.name.startswith(apart):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        print(found.name, error.name.partition(".")[0])
print("imported", len([name for name in __import__("sys").modules if name.startswith("weir.")]))
"""


def test_all_are_in_the_project_and_the_images_have_all_but_parquet() -> None:
    assert EXTRAS.keys() <= OPTIONAL.keys()
    (full,) = map(Requirement, OPTIONAL["full"])
    assert full.extras == EXTRAS.keys() - {"parquet"}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_installs_the_modules_that_are_looked_for(extra: str) -> None:
    assert is_installed(extra)  # the tests have all extras
    installed = installed_by(f"weir-serve[{extra}]") - installed_by("weir-serve")
    owners = packages_distributions()
    for module in EXTRAS[extra].modules:
        assert installed & {canonicalize_name(name) for name in owners[module.partition(".")[0]]}


def test_an_extra_lacks_one_of_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "textual" else object())
    assert not is_installed("tools")
    assert is_installed("cloud")

    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(extras, "find_spec", absent)
    assert not is_installed("tracing")


def test_what_is_missing_is_one_sentence() -> None:
    assert missing_extra("Parquet", "parquet") == "Parquet needs the extra parquet: pip install 'weir-serve[parquet]'"


@pytest.mark.timeout(180)
def test_a_lean_installation_imports_everything_but_what_an_extra_is_for(tmp_path: Path) -> None:
    environment = {**os.environ, **lean_environment(tmp_path)}
    ran = subprocess.run([sys.executable, "-P", "-c", IMPORT_ALL], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    *missing, count = ran.stdout.splitlines()
    assert int(count.removeprefix("imported ")) > 400
    assert dict(line.split() for line in missing) == NEEDS_AN_EXTRA


def test_packages_of_extras_are_not_installed_without_them() -> None:
    lean = installed_by("weir-serve[cpu]")
    assert {"onnxruntime", "numpy", "starlette"} <= lean
    for extra in EXTRAS:
        assert lean.isdisjoint(Requirement(one).name for one in OPTIONAL[extra])
