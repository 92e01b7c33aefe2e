"""Fixtures for tests of one's own models: a server of them, started when a test asks for it.

pytest finds this by its entry point. `weir_server` serves the repositories named by `--weir-model-repository` or by
`weir_model_repository` in pytest's configuration; `weir_serve` starts servers with options of the test's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from weir.server import Server

_INI = "weir_model_repository"
_OPTION = "--weir-model-repository"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares where the models are."""
    group = parser.getgroup("weir", "models served by Weir")
    group.addoption(
        _OPTION, action="append", metavar="FOLDER", help="Folder of models for weir_server; may be repeated."
    )
    parser.addini(_INI, "Folders of models for weir_server, relative to this file.", type="paths")


@pytest.fixture(scope="session")
def weir_server(pytestconfig: pytest.Config) -> Iterator[Server]:
    """A server of the configured repositories, the same for all tests."""
    # On the command line, folders are relative to where it is typed.
    folders = pytestconfig.getoption(_OPTION) or pytestconfig.getini(_INI)
    if not folders:
        pytest.fail(f"weir_server needs {_OPTION}, or {_INI} in pytest's configuration", pytrace=False)
    from weir.server import Server

    with Server(folders) as server:
        yield server


@pytest.fixture
def weir_serve() -> Iterator[Callable[..., Server]]:
    """Starts a server with the given repositories and options (those of `weir.Server`); they end with the test."""
    from weir.server import Server

    with contextlib.ExitStack() as started:

        def serve(model_repository: Any, **options: Any) -> Server:
            return started.enter_context(Server(model_repository, **options))

        yield serve
