"""Tests of what Triton's clients see; the servers are those of the integration tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from example_models import write_examples
from serving import Server


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the models that Triton's client examples ask."""
    folder = tmp_path_factory.mktemp("examples")
    (models := folder / "models").mkdir()
    write_examples(models)
    started = Server(folder, models)
    try:
        yield started
        assert started.stop() == 0
    finally:
        started.close()
