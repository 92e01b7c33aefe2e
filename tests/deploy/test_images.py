"""The image files follow good practice and install only locked packages."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath

import pytest

from tests.support.deploy.compose_project import COMPOSE, ROOT
from weir.demo.command import DEMO_FOLDER
from weir.demo.repository import build_demo_repositories

IMAGES = COMPOSE / "images"
DOCKERFILE = (IMAGES / "Dockerfile").read_text()
LOCKS = [*(IMAGES / f"{name}.lock" for name in ("build", "cpu", "gpu")), ROOT / "weir/console" / "npm" / "node.lock"]

INSTALLED = PurePosixPath("/", "opt", "weir").as_posix()


def pins(lock: Path) -> dict[str, set[str]]:
    """The versions of each package: several where they hold for different Pythons."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


def stages() -> dict[str, tuple[str, str]]:
    """(base, instructions) by the name of the stage."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {name: (base, text) for base, name, text in zip(*[iter(parts)] * 3, strict=True)}


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint
    done = subprocess.run([hadolint, IMAGES / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_images_are_made_of_official_ones_and_have_what_built_them_no_more() -> None:
    reply = stages()
    outside = {base for base, _ in reply.values() if base not in reply}
    assert outside == {"python:3.11-slim-bookworm"}
    for target in ("cpu", "gpu"):
        base, text = reply[target]
        assert base == "runtime"
        copied = re.findall(r"^COPY --from=(\S+) (\S+) (\S+)$", text, re.MULTILINE)
        # What changes rarely first: a change of the sources makes one small layer anew.
        assert copied == [(f"dependencies-{target}", INSTALLED, INSTALLED), ("weir", "/only-weir", INSTALLED)]
    assert "USER 10001:10001" in reply["runtime"][1]
    assert 'ENTRYPOINT ["weir"]' in reply["runtime"][1]
    assert list(reply)[-1] == "cpu"  # what is built without a target


def test_dependencies_do_not_depend_on_the_sources() -> None:
    reply = stages()
    for name in ("build", "dependencies-cpu", "dependencies-gpu", "web"):
        base, text = reply[name]
        assert base in ("build", "python:3.11-slim-bookworm")
        copied = re.findall(r"^COPY (?:--\S+ )?(\S+)", text, re.MULTILINE)
        assert copied
        assert set(copied) <= {
            "compose/images/build.lock",
            "compose/images/install-locked",
            f"compose/images/{name.removeprefix('dependencies-')}.lock",
            "weir/console/npm",
        }, name


def test_pip_installs_by_hashes_and_builds_with_locked_packages() -> None:
    """Each command that may reach a registry."""
    script = (IMAGES / "install-locked").read_text()
    commands = re.findall(r"pip (?:--python \S+ )?(?:install|wheel) (?:[^&\n]|(?<=\\)\n)*", DOCKERFILE + script)
    reaching = [command for command in commands if "--no-index" not in command]
    assert len(commands) == 6
    assert [command for command in reaching if "--require-hashes" not in command] == []
    (locked,) = [command for command in reaching if "--no-build-isolation" in command]
    assert "--only-binary :all: --no-binary nkeys" in locked


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_has_hashes_and_names_no_registry(lock: Path) -> None:
    text = lock.read_text()
    assert text.count("--hash=sha256:") >= len(pins(lock)) > 0
    assert "://" not in text


def test_node_can_be_installed_on_every_platform() -> None:
    """By hashes of the builds for Linux with glibc and with musl, macOS and Windows, on two architectures each, and of the
    source.
    """
    assert LOCKS[-1].read_text().count("--hash=sha256:") >= 9


@pytest.mark.parametrize("name", ("cpu", "gpu"))
def test_an_image_has_what_is_tested(name: str) -> None:
    tested, installed = pins(ROOT / "requirements.lock"), pins(IMAGES / f"{name}.lock")
    differs = {
        package: versions for package, versions in installed.items() if versions != tested.get(package, versions)
    }
    assert differs == {}
    of_weir = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = of_weir["optional-dependencies"]
    (full,) = extras["full"]
    inner = [one for extra in re.findall(r"\w+", full.partition("[")[2]) for one in extras[extra]]
    wanted = [*of_weir["dependencies"], *extras[name], *inner]
    names = {re.split(r"[\[>;=]", requirement)[0] for requirement in wanted} - {"weir-serve"}
    assert names <= installed.keys()
    assert not installed.keys() & {"pytest", "mypy", "ruff", "setuptools", "pip"}


def test_what_the_images_need_is_let_in() -> None:
    """`.dockerignore` leaves out all but what it names."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:].rstrip("/") for line in lines if line.startswith("!")}
    assert "*" in lines
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} <= let_in
    assert {"pyproject.toml", "README.md", "compose/images"} <= let_in
    assert [name for name in let_in if not (ROOT / name).exists()] == []
    copied = re.findall(r"^COPY (?:--chmod=\d+ )?(compose\S+)", DOCKERFILE, re.MULTILINE)
    assert copied
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_the_health_check_looks_at_the_age_of_the_file(tmp_path: Path) -> None:
    alive = tmp_path / "alive"

    def is_well(*limit: str) -> bool:
        command = [IMAGES / "weir-alive", *limit]
        return subprocess.run(command, env={"PATH": os.environ["PATH"], "WEIR_ALIVE_FILE": str(alive)}).returncode == 0

    assert not is_well()
    alive.touch()
    assert is_well()
    subprocess.run(["touch", "-d", "20 seconds ago", alive], check=True)
    assert not is_well()
    assert is_well("30")


def test_the_models_that_compose_serves_need_only_what_the_image_has(tmp_path: Path) -> None:
    """`make demo` makes them; one that can't be loaded would keep the container from ever being ready."""
    default = re.search(r"\$\{WEIR_MODELS:-\.\./(\S+)\}", (COMPOSE / "compose.yaml").read_text())
    assert default
    models, pictures = build_demo_repositories(tmp_path)
    assert Path(default[1]) == DEMO_FOLDER / models.name
    packages = packages_distributions()
    installed = {name.lower().replace("_", "-") for name in pins(IMAGES / "cpu.lock")}

    def missing(repository: Path) -> set[str]:
        nodes = [node for code in repository.glob("*/*/*.py") for node in ast.walk(ast.parse(code.read_text()))]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        others = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"triton_python_backend_utils"}
        return {name for name in others if not {one.lower() for one in packages.get(name, ())} & installed}

    assert list(models.glob("*/1/model.py"))
    assert missing(models) == set()
    assert missing(pictures) == {"cv2"}
