"""Models of object stores: loaded at the start, on request and while they change; stores that fail, hang or are slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.clients.stock import http_inputs
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.object_stores import (
    ACCOUNT,
    AzureServer,
    GoogleServer,
    ObjectStore,
    S3Server,
    StoreProxy,
    needs_azure,
    needs_s3,
)
from tests.support.servers.repository import write_adds
from tests.support.servers.roles import RoleProcess, Start, role_started
from tests.support.servers.weir_server import Server, clean_environment
from tests.support.waiting import wait_until

pytestmark = [needs_s3, pytest.mark.timeout(120)]

ENSEMBLE = """
platform: "ensemble"
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
ensemble_scheduling { step [
  { model_name: "step" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }
] }
"""

POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.3")


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    """A name that no other test has."""
    return f"b{abs(hash(request.node.nodeid)) % 10**12}"


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[StoreProxy]:
    opened = StoreProxy(s3.port)
    yield opened
    opened.close()


def added(served: Endpoints, name: str) -> float:
    """What the model adds to one."""
    with served.http() as client:
        answer = client.infer(name, http_inputs({"IN": np.ones(1, np.float32)})).as_numpy("OUT")
    return float(answer[0]) - 1


def index_of(served: Endpoints) -> list[dict[str, str]]:
    with served.http() as client:
        rows: list[dict[str, str]] = client.get_model_repository_index()
    return rows


def upload(store: ObjectStore, bucket: str, folder: Path, name: str, number: float, path: str = "models") -> None:
    write_adds(folder, name, number)
    store.upload(bucket, folder / name, f"{path}/{name}")


def unreadable(start: Start) -> list[str]:
    """What `weir status` shows of repositories that can't be read."""
    words = [sys.executable, "-P", "-m", "weir", "status", "--json", f"--nats={start.nats.url}"]
    done = subprocess.run(words, env=clean_environment(start.folder), capture_output=True, text=True, timeout=60)
    return [reason for role in json.loads(done.stdout)["roles"] for reason in role["unreadable"]]


def worker(start: Start, store: ObjectStore, *options: str) -> RoleProcess:
    return start("worker", *options, environment=store.environment)


@pytest.fixture
def served(start: Start) -> Endpoints:
    start("scheduler")
    return start.gateway()


@pytest.mark.parametrize("kind", ["s3", "google", pytest.param("azure", marks=needs_azure)])
def test_serve_loads_the_models_of_a_store(
    kind: str, request: pytest.FixtureRequest, bucket: str, tmp_path: Path
) -> None:
    store: ObjectStore = request.getfixturevalue(kind)
    store.create(bucket)
    upload(store, bucket, tmp_path / "models", "one", 1)
    upload(store, bucket, tmp_path / "models", "two", 2)
    address = store.address(bucket, "models")
    server = Server(tmp_path, address, environment=dict(store.environment))  # type: ignore[arg-type]
    try:
        assert "is ready" in server.printed()
        assert [added(server, name) for name in ("one", "two")] == [1, 2]
        assert f"'one' was fetched from {address}" in server.log()
        assert server.stop() == 0
    finally:
        server.close()


def test_objects_that_can_not_be_named_are_the_problem_of_their_model_alone(
    s3: S3Server, bucket: str, served: Endpoints, start: Start, tmp_path: Path
) -> None:
    s3.create(bucket)
    for name in ("broken", "good"):
        upload(s3, bucket, tmp_path / "local", name, 1)
    for key in ("notes//draft.txt", "control/%01/x", "broken/1/../model.onnx", "dot/./x"):
        s3.put_named(bucket, f"models/{key}")
    worker(start, s3, f"--model-repository={s3.address(bucket, 'models')}", *POLL)
    wait_until(lambda: served.is_ready("good"))
    reasons = {row["name"]: row.get("reason", "") for row in index_of(served)}
    bad = {name for name, reason in reasons.items() if "has an object that can't be a file" in reason}
    assert bad == {"notes", "control", "broken", "dot"}
    upload(s3, bucket, tmp_path / "local", "later", 2)
    wait_until(lambda: served.is_ready("later"))
    assert added(served, "later") == 2


@pytest.mark.parametrize("key", ["/x", "../x", "./config.pbtxt", "%01/x", "%01"])
def test_an_object_that_can_not_be_named_beside_the_models_concerns_none(
    s3: S3Server, bucket: str, served: Endpoints, start: Start, tmp_path: Path, key: str
) -> None:
    s3.create(bucket)
    for name in ("0_first", "good"):
        upload(s3, bucket, tmp_path / "local", name, 1)
    s3.put_named(bucket, f"models/{key}")
    worker(start, s3, f"--model-repository={s3.address(bucket, 'models')}", *POLL)
    wait_until(lambda: served.is_ready("good") and served.is_ready("0_first"))
    assert {row["name"] for row in index_of(served)} == {"0_first", "good"}
    upload(s3, bucket, tmp_path / "local", "later", 2)
    wait_until(lambda: served.is_ready("later"))


def test_explicit_loads_download_one_model_and_poll_what_changed(
    s3: S3Server, proxy: StoreProxy, bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    s3.create(bucket)
    for number, name in enumerate(("a", "b", "c")):
        upload(s3, bucket, tmp_path / "new", name, number)
    address = f"--model-repository={proxy.address(bucket, 'models')}"
    cache = f"--model-cache-dir={tmp_path / 'cache'}"
    explicit = worker(start, s3, address, cache, "--model-control-mode=explicit")
    with served.http() as client:
        assert [row["name"] for row in client.get_model_repository_index()] == ["a", "b", "c"]
        assert not [line for line in proxy.requests if "/models/" in line], "nothing is downloaded"
        client.load_model("b")
        assert added(served, "b") == 1
        assert {line.split()[1].split("/")[3] for line in proxy.requests if "/models/" in line} == {"b"}
        upload(s3, bucket, tmp_path / "new", "b", 7)
        client.load_model("b")
        assert added(served, "b") == 7
        upload(s3, bucket, tmp_path / "new", "d", 5)
        wait_until(lambda: len(client.get_model_repository_index()) == 4)
    assert explicit.end() == 0

    proxy.requests.clear()
    polling = worker(start, s3, address, cache, *POLL)
    assert [added(served, name) for name in "abcd"] == [0, 7, 2, 5]
    # The contents of `b` are in the cache.
    assert not [line for line in proxy.requests if "/models/b/" in line]
    proxy.requests.clear()
    wait_until(lambda: len(proxy.requests) >= 4)
    assert {line.partition("?")[0] for line in proxy.requests} == {f"GET /{bucket}"}, "a poll is one listing"
    upload(s3, bucket, tmp_path / "new", "c", 9)
    wait_until(lambda: added(served, "c") == 9)
    assert {line.split("/")[3] for line in proxy.requests if "/models/" in line} == {"c"}
    assert not [line for line in proxy.requests if "config.pbtxt" in line], "only the changed file is downloaded"
    s3.delete(bucket, "models/a")
    wait_until(lambda: not served.is_ready("a"))
    assert polling.end() == 0


def test_a_store_that_fails_or_hangs_does_not_affect_what_serves(
    s3: S3Server, proxy: StoreProxy, bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    s3.create(bucket)
    upload(s3, bucket, tmp_path / "new", "a", 1)
    write_adds(tmp_path / "local", "here", 3)
    options = (
        f"--model-repository={proxy.address(bucket, 'models')}",
        f"--model-repository={tmp_path / 'local'}",
        f"--model-cache-dir={tmp_path / 'cache'}",
    )
    first = worker(start, s3, *options, *POLL)
    assert (added(served, "a"), added(served, "here")) == (1, 3)
    proxy.refuses = True
    wait_until(lambda: "its models stay as they are until it can be read" in first.log())
    write_adds(tmp_path / "local", "here", 4)
    wait_until(lambda: added(served, "here") == 4)
    assert added(served, "a") == 1
    wait_until(lambda: unreadable(start))
    assert unreadable(start)[0].startswith(f"model repository {proxy.address(bucket, 'models')} can't be listed: ")
    assert served.is_ready(), "what serves is ready"
    # A worker that starts meanwhile has the models that were fetched before.
    second = worker(start, s3, *options, *POLL)
    assert "1 models of s3://" in second.log()
    assert first.end() == 0
    assert added(served, "a") == 1
    upload(s3, bucket, tmp_path / "new", "a", 2)
    proxy.refuses = False
    wait_until(lambda: added(served, "a") == 2)
    assert "can be read again" in second.log()
    wait_until(lambda: not unreadable(start))
    proxy.hangs = True
    write_adds(tmp_path / "local", "here", 5)
    wait_until(lambda: added(served, "here") == 5)
    assert added(served, "a") == 2
    assert second.end() == 0


def test_models_serve_while_others_download_and_a_killed_download_is_repeated(
    s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    s3.create(bucket)
    upload(s3, bucket, tmp_path / "new", "small", 1)
    write_adds(tmp_path / "new", "large", 2)
    content = np.random.default_rng(1).bytes(24 << 20)
    (tmp_path / "new" / "large" / "1" / "weights").write_bytes(content)
    s3.upload(bucket, tmp_path / "new" / "large", "models/large")
    proxy = StoreProxy(s3.port, bytes_per_s=4 << 20)
    with Server(
        tmp_path,
        proxy.address(bucket, "models"),  # type: ignore[arg-type]
        f"--model-cache-dir={tmp_path / 'cache'}",
        environment=dict(s3.environment),
    ) as server:
        assert "1 of 2 models is not ready" in server.printed()
        assert "LOADING" in server.printed()
        assert added(server, "small") == 1
        assert not server.is_ready()
        small = {path.name for path in (tmp_path / "new" / "large").rglob("*") if path.is_file()} - {"weights"}
        (files,) = wait_until(lambda: list((tmp_path / "cache").glob("store-*/large/*/files")))
        wait_until(lambda: small == {path.name for path in files.rglob("*") if path.is_file()})
        proxy.requests.clear()
        server.kill("worker", signal.SIGKILL)
        server.wait_ready("large")
        assert added(server, "large") == 2
        # Of what the killed worker had, only the incomplete file is downloaded again.
        downloaded = {line.partition("/models/")[2].split()[0] for line in proxy.requests if "/models/" in line}
        assert downloaded == {"large/1/weights"}
        (copy,) = (tmp_path / "cache").glob("weir-mirror-*/models/large/1/weights")
        assert copy.read_bytes() == content
        server.wait_ready()
        proxy.close()


def test_workers_of_a_host_share_downloads(
    s3: S3Server, proxy: StoreProxy, bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    s3.create(bucket)
    write_adds(tmp_path / "new", "m", 1)
    (tmp_path / "new" / "m" / "1" / "weights").write_bytes(os.urandom(8 << 20))
    s3.upload(bucket, tmp_path / "new" / "m", "models/m")
    address = f"--model-repository={proxy.address(bucket, 'models')}"
    for _ in range(2):
        worker(start, s3, address, f"--model-cache-dir={tmp_path / 'cache'}")
    assert added(served, "m") == 1
    assert proxy.sent_bytes < 9 << 20


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("no bucket", "bucket 'nowhere' does not exist"),
        ("denied", "the store denies access (InvalidAccessKeyId): check the credentials and their permission"),
        ("refused", "models can't be listed: http://"),
        ("hangs", "the store did not answer in 15 s"),
    ],
)
def test_a_repository_that_can_not_be_read_ends_the_start(
    problem: str, message: str, start: Start, bucket: str, tmp_path: Path
) -> None:
    own = S3Server()
    proxy = StoreProxy(own.port)
    own.create(bucket)
    if problem == "denied":
        own.deny()
    proxy.refuses, proxy.hangs = problem == "refused", problem == "hangs"
    address = proxy.address("nowhere" if problem == "no bucket" else bucket, "models")
    words = ["worker", f"--nats={start.nats.url}", f"--model-repository={address}"]
    try:
        process, facts = role_started(words, tmp_path / "logs", tmp_path / "log", own.environment)
        assert process.wait(30) == 1
        assert message in facts["error"]
        assert facts["error"].startswith(f"model repository {address} can't be listed: ")
    finally:
        proxy.close()
        own.close()


def test_models_come_when_a_store_can_be_read_at_last(
    s3: S3Server, proxy: StoreProxy, bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    s3.create(bucket)
    upload(s3, bucket, tmp_path / "new", "m", 3)
    proxy.refuses = True
    worker(start, s3, f"--model-repository={proxy.address(bucket, 'models')}", "--exit-on-error=false")
    proxy.refuses = False
    wait_until(lambda: served.is_ready("m"))
    assert added(served, "m") == 3


def test_an_ensemble_waits_for_the_download_of_its_models(
    s3: S3Server, proxy: StoreProxy, bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    s3.create(bucket)
    write_adds(tmp_path / "new", "step", 2)
    (tmp_path / "new" / "step" / "1" / "weights").write_bytes(os.urandom(4 << 20))
    s3.upload(bucket, tmp_path / "new" / "step", "models/step")
    s3.put(bucket, "models/whole/config.pbtxt", ENSEMBLE.encode())
    s3.create_folder(bucket, "models/whole/1")
    proxy.bytes_per_s = 4 << 20
    worker(start, s3, f"--model-repository={proxy.address(bucket, 'models')}", "--exit-on-error=true")
    assert added(served, "whole") == 2


def test_lost_permission_leaves_models_as_they_are(
    bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    own = S3Server()
    try:
        own.create(bucket)
        upload(own, bucket, tmp_path / "new", "m", 1)
        polling = worker(start, own, f"--model-repository={own.address(bucket, 'models')}", *POLL)
        own.deny()
        wait_until(lambda: "the store denies access (InvalidAccessKeyId)" in polling.log())
        assert added(served, "m") == 1
        own.deny(False)
        upload(own, bucket, tmp_path / "new", "m", 2)
        wait_until(lambda: added(served, "m") == 2)
        assert polling.end() == 0
    finally:
        own.close()


def test_a_worker_that_downloads_ends_at_once(
    s3: S3Server, proxy: StoreProxy, bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    s3.create(bucket)
    write_adds(tmp_path / "new", "m", 1)
    (tmp_path / "new" / "m" / "1" / "weights").write_bytes(os.urandom(16 << 20))
    s3.upload(bucket, tmp_path / "new" / "m", "models/m")
    proxy.bytes_per_s = 1 << 20
    downloading = worker(start, s3, f"--model-repository={proxy.address(bucket, 'models')}")
    assert downloading.end() == 0
    assert not list((tmp_path / "logs" / "tmp").glob("weir-mirror-*"))


def test_a_half_uploaded_model_is_loaded_when_it_is_complete(
    s3: S3Server, bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    s3.create(bucket)
    write_adds(tmp_path / "new", "m", 4)
    s3.put(bucket, "models/m/config.pbtxt", (tmp_path / "new" / "m" / "config.pbtxt").read_bytes())
    polling = worker(start, s3, f"--model-repository={s3.address(bucket, 'models')}", *POLL)
    assert "'m' of s3://" in polling.log()
    assert "has no files of a version yet: its upload may be incomplete" in polling.log()
    with served.http() as client:
        (row,) = client.get_model_repository_index()
        assert "at least one version must be available" in row["reason"]
    s3.upload(bucket, tmp_path / "new" / "m", "models/m")
    wait_until(lambda: served.is_ready("m"))
    assert added(served, "m") == 4


def test_credentials_come_from_triton_s_file_by_longest_prefix(
    s3: S3Server, google: GoogleServer, bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    for store in (s3, google):
        store.create(bucket)
    upload(s3, bucket, tmp_path / "new", "a", 1)
    upload(google, bucket, tmp_path / "new", "g", 2)
    keys = {"key_id": "test", "secret_key": "secret", "region": "us-east-1", "session_token": "", "profile": ""}
    file = tmp_path / "credentials.json"
    file.write_text(
        json.dumps(
            {
                "s3": {"": {**keys, "profile": "nobody", "key_id": ""}, s3.address(bucket): keys},
                "gs": {"": "/nowhere", f"gs://{bucket}": str(google.file)},
            }
        )
    )
    start(
        "worker",
        *(f"--model-repository={store.address(bucket, 'models')}" for store in (s3, google)),
        environment={"TRITON_CLOUD_CREDENTIAL_PATH": str(file), "AWS_SESSION_TOKEN": "of another key"},
    )
    assert (added(served, "a"), added(served, "g")) == (1, 2)


@needs_azure
def test_an_azure_address_may_have_the_full_host(
    azure: AzureServer, bucket: str, start: Start, served: Endpoints, tmp_path: Path
) -> None:
    azure.create(bucket)
    upload(azure, bucket, tmp_path / "new", "m", 1, path="a/b")
    worker(start, azure, f"--model-repository=as://{ACCOUNT}.blob.core.windows.net/{bucket}/a/b/")
    assert added(served, "m") == 1
