"""The pytest fixtures for tests of a user's own models, in a folder of a user's project."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support.models.zoo import write_identity, write_slow


def pytest_in(folder: Path, test: str, *options: str) -> str:
    """What pytest prints of a test file in `folder`."""
    (folder / "test_models.py").write_text(textwrap.dedent(test))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "weir.pytest_plugin", "-p", "no:cacheprovider", "-q", *options],
        cwd=folder,
        # By its name alone: where Weir is installed, its entry point would name the plugin a second time.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=50,
    )
    return ran.stdout + ran.stderr


def test_a_server_of_the_named_models_for_all_tests_and_servers_with_options(tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "identity", "FP32")
    write_slow(tmp_path / "more", "other", "")
    printed = pytest_in(
        tmp_path,
        """
        import numpy as np

        seen = []

        def test_identity(weir_server):
            seen.append(weir_server.pid)
            value = np.ones((1, 3), np.float32)
            np.testing.assert_array_equal(weir_server.infer("identity", {"IN": value})["OUT"], value)

        def test_the_same_server_serves_all_tests(weir_server):
            assert weir_server.pid == seen[0]
            assert weir_server.ready("other")

        def test_servers_of_the_test_s_own(weir_serve):
            server = weir_serve("models", id="mine")
            assert server.metadata()["name"] == "mine"
            seen.append(server.pid)

        def test_they_ended_with_the_test():
            import os, pytest
            with pytest.raises(ProcessLookupError):
                os.kill(seen[-1], 0)
        """,
        "--weir-model-repository=models",
        f"--weir-model-repository={tmp_path / 'more'}",
    )
    assert "4 passed" in printed, printed


def test_without_models_it_says_what_is_missing(tmp_path: Path) -> None:
    printed = pytest_in(
        tmp_path,
        """
        def test_ready(weir_server):
            assert weir_server.ready("identity")
        """,
    )
    assert "weir_server needs --weir-model-repository, or weir_model_repository in pytest's configuration" in printed


def test_it_costs_nothing_where_it_is_not_used(tmp_path: Path) -> None:
    test = """
        import sys

        def test_nothing_was_imported():
            assert "weir.pytest_plugin" in sys.modules
            assert not {"weir.server", "grpc", "numpy", "typer"} & sys.modules.keys()
        """
    assert "1 passed" in pytest_in(tmp_path, test)
