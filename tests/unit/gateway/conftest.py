"""Fixtures of gRPC frontends: one for all tests of a module, and one that a test may stop."""

from collections.abc import Iterator

import pytest

from tests.support.gateway.grpc_frontend import GrpcFrontend, Loop


@pytest.fixture(scope="module")
def grpc_loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.close()


@pytest.fixture(scope="module")
def shared_frontend(grpc_loop: Loop) -> Iterator[GrpcFrontend]:
    opened = GrpcFrontend(grpc_loop)
    yield opened
    opened.close()


@pytest.fixture
def frontend(shared_frontend: GrpcFrontend) -> GrpcFrontend:
    shared_frontend.inference.reset()
    shared_frontend.catalog.ready = True
    return shared_frontend


@pytest.fixture
def own_frontend(grpc_loop: Loop) -> Iterator[GrpcFrontend]:
    opened = GrpcFrontend(grpc_loop)
    yield opened
    opened.close()
