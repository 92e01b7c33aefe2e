"""Fixtures of servers: a shared one for tests that only send requests, and own ones for tests that break something."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
import tritonclient.http

from tests.support.models.zoo import write_small_zoo, write_zoo
from tests.support.servers.object_stores import AzureServer, GoogleServer, S3Server
from tests.support.servers.roles import Start
from tests.support.servers.weir_server import Serve, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with every model of the zoo, for tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "models").mkdir()
    write_zoo(folder / "models")
    with Server(folder, folder / "models") as started:
        pids = started.pids()
        yield started
        assert started.pids() == pids, "a role has died meanwhile"
        assert started.in_flight() == 0


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the test module's own with an identity, a slow and a faulty model, to be hurt."""
    folder = tmp_path_factory.mktemp("hurt")
    write_small_zoo(folder / "models")
    with Server(folder, folder / "models") as started:
        yield started


@pytest.fixture
def hurt(module_server: Server) -> Iterator[Server]:
    """The module's server, whole: it must be so again after each test."""
    yield module_server
    module_server.wait_ready()
    assert module_server.in_flight() == 0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers of the test's own; each must stop cleanly in the end."""
    started: list[Server] = []

    def start(repository: Path, *options: str) -> Server:
        folder = tmp_path / f"server{len(started)}"
        folder.mkdir()
        started.append(Server(folder, repository, *options))
        return started[-1]

    yield start
    try:
        for running in started:
            if running.process.poll() is None:
                assert running.stop(signal.SIGTERM) == 0
    finally:
        for running in started:
            running.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A server of S3 for tests with buckets of their own."""
    started = S3Server()
    yield started
    started.close()


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """A server of Azure Blob Storage for tests with containers of their own."""
    started = AzureServer(tmp_path_factory.mktemp("azure"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleServer]:
    """A server of Google Cloud Storage for tests with buckets of their own."""
    started = GoogleServer(tmp_path_factory.mktemp("google"))
    yield started
    started.close()


@pytest.fixture
def http(server: Server) -> Iterator[tritonclient.http.InferenceServerClient]:
    """A stock HTTP client of the shared server."""
    with server.http() as client:
        yield client


@pytest.fixture
def grpc(server: Server) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    """A stock gRPC client of the shared server."""
    with server.grpc() as client:
        yield client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts roles against a nats-server of the test's own."""
    starting = Start(tmp_path)
    try:
        yield starting
        starting.end_all()
    finally:
        starting.close()
