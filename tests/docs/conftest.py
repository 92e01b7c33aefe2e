"""One server for all documented commands that only send requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers.demo import Served, demo_served


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with demo_served(tmp_path_factory.mktemp("serve")) as served:
        yield served
