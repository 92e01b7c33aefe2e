"""pytest fixtures for tests of your own models.

pytest loads this module by its entry point. `weir_server` serves the repositories given by `--weir-model-repository` or
`weir_model_repository` in pytest's configuration; `weir_serve` starts servers with options given by the test.
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
    """Declare the options for the model repositories."""
    group = parser.getgroup("weir", "models served by Weir")
    group.addoption(
        _OPTION, action="append", metavar="FOLDER", help="Folder of models for weir_server; may be repeated."
    )
    parser.addini(_INI, "Folders of models for weir_server, relative to this file.", type="paths")


@pytest.fixture(scope="session")
def weir_server(pytestconfig: pytest.Config) -> Iterator[Server]:
    """A server of the configured repositories, shared by all tests of the session."""
    # On the command line, folders are relative to the current folder.
    folders = pytestconfig.getoption(_OPTION) or pytestconfig.getini(_INI)
    if not folders:
        pytest.fail(f"weir_server needs {_OPTION}, or {_INI} in pytest's configuration", pytrace=False)
    from weir.server import Server

    with Server(folders) as server:
        yield server


@pytest.fixture
def weir_serve() -> Iterator[Callable[..., Server]]:
    """Start servers with the given repositories and options of `weir.Server`; they stop at the end of the test."""
    from weir.server import Server

    with contextlib.ExitStack() as started:

        def serve(model_repository: Any, **options: Any) -> Server:
            return started.enter_context(Server(model_repository, **options))

        yield serve
