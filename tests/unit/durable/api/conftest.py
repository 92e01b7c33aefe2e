"""A nats-server for all tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from weir.bus.nats.embedded_server import EmbeddedNats


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats(Path(tmp_path_factory.mktemp("nats")))
    server.start()
    yield server.url
    server.stop()
