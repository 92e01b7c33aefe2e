"""The engine and the images of the tests of containers, and the figures that they report."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.deploy.compose_project import PROJECTS, ComposeProject, example_environment
from tests.support.deploy.container_engine import Engine, EngineError, Engines, missing
from tests.support.deploy.container_images import build_weir, prepare
from tests.support.models.zoo import write_identity, write_slow

FIGURES: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was measured, after what failed."""
    if FIGURES:
        terminalreporter.section("containers")
        for line in FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def report() -> Callable[[str], None]:
    """Adds a line to what is printed at the end."""
    return FIGURES.append


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine that has Weir's images and those of the programs beside it; this process is in its network."""
    if reason := missing():
        pytest.skip(reason)
    engines = Engines()
    others = {
        service["image"]
        for service in ComposeProject(PROJECTS["roles apart"], example_environment()).services.values()
        if not service["image"].startswith("weir:")
    }
    try:
        with contextlib.ExitStack() as stack:
            began_s = time.monotonic()
            try:
                builder = stack.enter_context(engines.building())
                prepare(builder, engines.folder, sorted(others))
            except EngineError as error:
                pytest.skip(f"there is no engine, or no base image: {str(error).splitlines()[0]}")
            FIGURES.append(f"base image, nats-server and HAProxy: {time.monotonic() - began_s:.0f} s")
            for target in ("cpu", "gpu") if os.environ.get("WEIR_CONTAINERS_GPU") else ("cpu",):
                began_s = time.monotonic()
                build_weir(builder, target, f"weir:{target}")
                size = builder.ask("GET", f"/images/weir:{target}/json")["Size"]
                FIGURES.append(f"weir:{target}: {size / 1e6:.0f} MB, built in {time.monotonic() - began_s:.0f} s")
        with engines.running() as running, running.joined():
            yield running
    finally:
        engines.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of `fast` (an ONNX identity of INT64) and `slow` (a Python model), for every user to read."""
    folder = tmp_path_factory.mktemp("models")
    write_identity(folder, "fast", "INT64", "dynamic_batching { }")
    write_slow(folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder
