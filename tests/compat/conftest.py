"""Fixtures of the compatibility tests; the servers are those of the integration tests."""

from collections.abc import Iterator

import pytest

from tests.support.models.triton_examples import write_examples
from tests.support.servers.weir_server import Server


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the models that Triton's client examples ask."""
    folder = tmp_path_factory.mktemp("examples")
    (models := folder / "models").mkdir()
    write_examples(models)
    with Server(folder, models) as started:
        yield started
