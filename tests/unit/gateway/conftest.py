"""Fixtures of gRPC front doors: one for all tests of a module, and one to be stopped."""

from collections.abc import Iterator

import pytest
from grpc_door import Door, Loop


@pytest.fixture(scope="module")
def grpc_loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.close()


@pytest.fixture(scope="module")
def shared_door(grpc_loop: Loop) -> Iterator[Door]:
    opened = Door(grpc_loop)
    yield opened
    opened.close()


@pytest.fixture
def door(shared_door: Door) -> Door:
    shared_door.inference.reset()
    shared_door.catalog.ready = True
    return shared_door


@pytest.fixture
def own_door(grpc_loop: Loop) -> Iterator[Door]:
    opened = Door(grpc_loop)
    yield opened
    opened.close()
