"""Checks of folders and ports before the start."""

import socket
from pathlib import Path

import pytest

from weir.commands.preflight import Listener, check_listeners, check_port_range, check_repositories
from weir.errors import StartError


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_repository_must_be_given_and_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^--model-repository must be specified$"):
        check_repositories([])
    with pytest.raises(StartError, match=r"missing is not a folder$"):
        check_repositories([tmp_path, tmp_path / "missing"])
    assert check_repositories([tmp_path, f"{tmp_path}/"]) == (tmp_path,)


def test_relative_repositories_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check_repositories([Path("models")]) == (tmp_path / "models",)


def test_a_repository_may_lie_in_nats(tmp_path: Path) -> None:
    assert check_repositories(["nats://shop-1", tmp_path, "nats://shop-1"]) == ("nats://shop-1", tmp_path)
    with pytest.raises(StartError, match="'host:4222' is not a repository name"):
        check_repositories(["nats://host:4222"])


def test_a_taken_port_is_named(taken_port: int) -> None:
    with pytest.raises(StartError, match=rf"^can't listen for GRPC requests at 127\.0\.0\.1:{taken_port}: .*in use$"):
        check_listeners([Listener("HTTP", "127.0.0.1", 0), Listener("GRPC", "127.0.0.1", taken_port)])


def test_two_protocols_can_t_share_a_port() -> None:
    with pytest.raises(StartError, match="cannot listen to HTTP requests and GRPC requests at the same address and"):
        check_listeners([Listener("HTTP", "127.0.0.1", 39999), Listener("GRPC", "127.0.0.1", 39999)])


def test_free_ports_may_be_asked_for_by_all() -> None:
    check_listeners([Listener(protocol, "127.0.0.1", 0) for protocol in ("HTTP", "GRPC", "metrics")])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartError, match=r"^can't listen for HTTP requests at 203\.0\.113\.1:0: "):
        check_listeners([Listener("HTTP", "203.0.113.1", 0)])


def test_a_port_whose_connections_have_just_ended_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # the server's end closes first and stays in TIME_WAIT
    check_listeners([Listener("HTTP", "127.0.0.1", port)])


def test_a_port_that_is_shared_is_free_for_those_who_share_it() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        check_listeners([Listener("HTTP", "127.0.0.1", port, shares=True)])
        with pytest.raises(StartError, match="in use"):
            check_listeners([Listener("HTTP", "127.0.0.1", port)])


def test_addresses_of_object_stores_are_checked_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ("s3://bucket/models", "gs://bucket/models", "as://account/container/models")
    assert check_repositories(addresses) == addresses
    with pytest.raises(StartError, match=r"^invalid model repository: 'gs://' names no bucket$"):
        check_repositories(["gs://"])
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", "/nowhere")
    with pytest.raises(StartError, match=r"^TRITON_CLOUD_CREDENTIAL_PATH=/nowhere can't be read: No such file"):
        check_repositories(["s3://bucket/models"])


def test_other_frontends_keep_to_the_ports_that_sagemaker_allows() -> None:
    http = Listener("HTTP", "127.0.0.1", 8000)
    check_port_range([http], 8000, 9000)
    check_port_range([], 8081, 9000)
    with pytest.raises(StartError) as caught:
        check_port_range([Listener("GRPC", "127.0.0.1", 8500), http], 8081, 9000)
    assert str(caught.value) == (
        "The server cannot listen to HTTP requests at port 8000, allowed port range is [8081, 9000]"
    )
