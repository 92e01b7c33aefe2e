"""The requests of a model split among its versions: over every protocol, at every gateway, and after a restart."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import nats
import numpy as np
import pytest

from tests.support.clients.stock import Answer, RawConnection, grpc_inputs, http_inputs, infer_body, post
from tests.support.models.zoo import write_python_model, write_versions
from tests.support.servers.several_gateways import connect, processes_of
from tests.support.servers.weir_server import Server, clean_environment
from tests.support.waiting import wait_until
from weir.gateway.grpc.weir_service import SERVICE, message_type

IN = np.zeros(1, np.float32)
REQUESTS = 200


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two gateways, and a model of versions 1 to 3."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "models").mkdir()
    write_versions(folder / "models", "versions", "version_policy { all { } }")
    with Server(
        folder, folder / "models", "--gateways=2", "--model-control-mode=explicit", "--load-model=versions"
    ) as server:
        yield server


@pytest.fixture
def server(two: Server) -> Iterator[Server]:
    yield two
    change(two, "DELETE")


def change(server: Server, method: str = "GET", document: Any = None, model: str = "versions", **headers: str) -> Any:
    """The response to a request for the traffic rule."""
    body = None if document is None else json.dumps(document).encode()
    url = f"http://{server.http_place}/v2/models/{model}/traffic"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method), timeout=20) as answer:
        return json.loads(answer.read())


def split(server: Server, sticky: str = "", **weights: float) -> Any:
    return change(server, "PUT", {"weights": {v[1:]: w for v, w in weights.items()}, "sticky": sticky})


def answered_by(
    server: Server, requests: int = REQUESTS, headers: dict[str, str] | None = None, **more: Any
) -> Counter[str]:
    """How many of the requests each version has answered; the model adds the number of its version."""
    with server.http() as client:
        found: Counter[str] = Counter()
        for _ in range(requests):
            result = client.infer("versions", http_inputs({"IN": IN}), headers=headers, **more)
            assert result.as_numpy("OUT")[0] == float(result.get_response()["model_version"])
            found[result.get_response()["model_version"]] += 1
        return found


def test_requests_without_a_version_are_split_by_weight(server: Server) -> None:
    assert answered_by(server, 5) == {"3": 5}
    shown = split(server, v1=90, v2=10)
    assert shown["source"] == "set"
    assert [row["share"] for row in shown["versions"]] == [0.9, 0.1]
    found = answered_by(server)
    assert abs(found["2"] - REQUESTS / 10) <= 2
    assert found["1"] + found["2"] == REQUESTS
    assert answered_by(server, 5, model_version="3") == {"3": 5}


def test_grpc_requests_are_split(server: Server) -> None:
    split(server, v1=50, v2=50)
    with server.grpc() as client:
        results = [client.infer("versions", grpc_inputs({"IN": IN})) for _ in range(REQUESTS)]
    found = Counter(result.get_response().model_version for result in results)
    assert all(result.as_numpy("OUT")[0] == float(result.get_response().model_version) for result in results)
    assert abs(found["1"] - REQUESTS / 2) <= 2


async def ask_nats(url: str, subject: str, user: str = "", requests: int = REQUESTS) -> Counter[str]:
    connection = await nats.connect(url)
    try:
        body, headers = infer_body({"IN": IN}), {"X-User": user} if user else None
        answers = [await connection.request(subject, body, timeout=20, headers=headers) for _ in range(requests)]
        return Counter(str(json.loads(answer.data)["model_version"]) for answer in answers)
    finally:
        await connection.close()


def test_nats_requests_are_split(server: Server) -> None:
    split(server, "header:x-user", v1=50, v2=50)
    found = asyncio.run(ask_nats(server.nats_url, "infer.versions"))
    assert abs(found["1"] - REQUESTS / 2) <= 3  # two gateways
    assert len(asyncio.run(ask_nats(server.nats_url, "infer.versions", "me", 20))) == 1


def test_durable_requests_are_split_and_their_records_name_the_version(server: Server) -> None:
    split(server, "header:x-user", v1=50, v2=50)

    async def results() -> tuple[Counter[str], set[str]]:
        connection = await nats.connect(server.nats_url)
        try:
            stream = connection.jetstream()
            follow = await stream.subscribe("result.versions.>", ordered_consumer=True)
            for number in range(40):
                headers = {"Nats-Msg-Id": f"r{number}"} | ({"X-User": "me"} if number % 2 else {})
                await stream.publish("event.versions", infer_body({"IN": IN}), headers=headers)
            records = [await follow.next_msg(timeout=20) for _ in range(40)]
            digests = {(r.headers["Weir-Model-Version"], r.headers["Weir-Model-Digest"]) for r in records}
            assert len(digests) == len({version for version, _ in digests})
            of_me = {r.headers["Weir-Model-Version"] for r in records if int(r.headers["Weir-Id"][1:]) % 2}
            rest = Counter(r.headers["Weir-Model-Version"] for r in records if not int(r.headers["Weir-Id"][1:]) % 2)
            return rest, of_me
        finally:
            await connection.close()

    rest, of_me = asyncio.run(results())
    assert abs(rest["1"] - 10) <= 2
    assert len(of_me) == 1


def test_a_user_stays_on_one_version_over_every_protocol(server: Server) -> None:
    split(server, "header:X-User", v1=50, v2=50)
    chosen: dict[str, str] = {}
    for user in map(str, range(12)):
        found = answered_by(server, 6, {"X-User": user})
        assert len(found) == 1
        chosen[user] = next(iter(found))
    assert set(chosen.values()) == {"1", "2"}
    with server.grpc() as client:
        for user, version in chosen.items():
            results = [client.infer("versions", grpc_inputs({"IN": IN}), headers={"x-user": user}) for _ in range(3)]
            assert {result.get_response().model_version for result in results} == {version}
    split(server, "header:x-user", v1=20, v2=80)
    for user, version in chosen.items():
        if version == "2":
            assert answered_by(server, 3, {"X-User": user}) == {"2": 3}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_without_the_header_are_split_behind_an_equal_one_of_a_user(server: Server, protocol: str) -> None:
    split(server, "header:x-user", v1=90, v2=10)
    inputs: Any = http_inputs({"IN": IN}) if protocol == "http" else grpc_inputs({"IN": IN})
    with server.http() if protocol == "http" else server.grpc() as client:

        def version_for(user: str = "", **more: Any) -> str:
            headers = {"x-user": user} if user else None
            response = client.infer("versions", inputs, headers=headers, **more).get_response()
            return str(response["model_version"] if protocol == "http" else response.model_version)

        # The user is found with other parameters: the gateway must not have seen an equal request of anyone.
        users = (str(number) for number in range(500))
        user = next(user for user in users if version_for(user, parameters={"search": user}) == "2")
        assert version_for(user) == "2"
        found = Counter(version_for() for _ in range(REQUESTS))
    assert abs(found["2"] - REQUESTS / 10) <= 2


def test_a_user_stays_on_one_version_with_asynchronous_requests(server: Server) -> None:
    split(server, "header:x-user", v1=50, v2=50)
    body, url = infer_body({"IN": IN}), f"http://{server.http_place}"

    def later(user: str) -> str:
        headers = {"Prefer": "respond-async", "X-User": user, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v2/models/versions/infer", body, headers)
        with urllib.request.urlopen(request, timeout=20) as response:
            assert response.status == 202
            return str(json.loads(response.read())["id"])

    def fetched(path: str) -> Any:
        with urllib.request.urlopen(f"{url}/v2/jobs/{path}", timeout=20) as response:
            document, _ = json.JSONDecoder().raw_decode(response.read().decode("latin-1"))
        return document

    def version_of(id: str) -> Any:
        wait_until(lambda: fetched(id)["status"] == "succeeded")
        return fetched(f"{id}/result")["model_version"]

    chosen = {user: next(iter(answered_by(server, 1, {"X-User": user}))) for user in map(str, range(8))}
    assert set(chosen.values()) == {"1", "2"}
    for user, version in chosen.items():
        assert version_of(later(user)) == version
    with server.grpc() as client:
        for user, version in chosen.items():
            headers = {"prefer": "respond-async", "x-user": user}
            accepted = client.infer("versions", grpc_inputs({"IN": IN}), headers=headers).get_response()
            assert version_of(accepted.parameters["job_id"].string_param) == version


def test_a_parameter_keeps_a_user_on_one_version(server: Server) -> None:
    split(server, "parameter:user", v1=50, v2=50)
    chosen = {user: answered_by(server, 4, parameters={"user": user}) for user in map(str, range(12))}
    assert all(len(found) == 1 for found in chosen.values())
    assert {next(iter(found)) for found in chosen.values()} == {"1", "2"}


def test_a_change_is_in_effect_at_the_other_gateway_when_its_client_has_the_response(server: Server) -> None:
    def answered(connection: RawConnection, request: bytes) -> Answer:
        answer = connection.ask(request)
        assert answer is not None
        assert answer.status == 200, answer.body
        return answer

    request = post("/v2/models/versions/infer", infer_body({"IN": IN}))
    first, second = processes_of(server, "gateway")
    with connect(server, first) as one, connect(server, second) as other:
        for version in ("1", "2", "3", "1"):
            put = post("/v2/models/versions/traffic", json.dumps({"weights": {version: 1}}).encode())
            answered(one, b"PUT" + put.removeprefix(b"POST"))
            assert answered(other, request).document["model_version"] == version


@pytest.mark.parametrize("gateways", [1, 2])
def test_a_rule_and_copies_that_are_set_at_the_same_time_both_stay(server: Server, gateways: int) -> None:
    processes = processes_of(server, "gateway")
    with connect(server, processes[0]) as one, connect(server, processes[gateways - 1]) as other:
        split(server, v1=100)
        for number in range(1, 30):
            rule = post("/v2/models/versions/traffic", json.dumps({"weights": {"1": number, "2": 1}}).encode())
            copies = post("/v2/models/versions/traffic/shadow", json.dumps({"version": 3, "share": number}).encode())
            for connection, request in ((one, rule), (other, copies)):
                connection.send(b"PUT" + request.removeprefix(b"POST"))
            for connection in (one, other):
                answer = connection.answer()
                assert answer is not None
                assert answer.status == 200, answer.body
            for connection in (one, other):
                answer = connection.ask(b"GET /v2/models/versions/traffic HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert answer is not None
                shown = answer.document
                assert (shown["weights"], shown["shadow"]["share"]) == ({"1": number, "2": 1}, number)


def test_grpc_clients_change_the_rule(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_place) as channel:

        def call(method: str, request: Any) -> Any:
            respond = message_type("TrafficResponse").FromString
            return channel.unary_unary(f"/{SERVICE}/{method}", type(request).SerializeToString, respond)(request)

        shown = call("SetTraffic", message_type("SetTrafficRequest")(model="versions", weights={1: 3, 2: 1}))
        assert [(row.version, row.share, row.ready) for row in shown.versions] == [(1, 0.75, True), (2, 0.25, True)]
        assert call("GetTraffic", message_type("TrafficRequest")(model="versions")) == shown
        assert change(server)["source"] == "set"
        assert call("ClearTraffic", message_type("TrafficRequest")(model="versions")).source == "none"
        with pytest.raises(grpc.RpcError) as caught:
            call("SetTraffic", message_type("SetTrafficRequest")(model="versions"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_share_of_a_version_that_is_not_ready_goes_to_the_others(server: Server) -> None:
    shown = split(server, v1=80, v2=10, v9=10)
    assert [row["ready"] for row in shown["versions"]] == [True, True, False]
    assert [round(row["share"], 4) for row in shown["versions"]] == [0.8889, 0.1111, 0]
    found = answered_by(server)
    assert found["1"] + found["2"] == REQUESTS
    report = json.loads(weir(server, "status", "--json", f"--nats={server.nats_url}").stdout)
    problems = [row for row in report["problems"] if row["kind"] == "split version not ready"]
    assert [row["about"] for row in problems] == ["versions"]
    (model,) = (row for row in report["models"] if row["name"] == "versions")
    assert {row["version"]: row["weight"] for row in model["versions"]} == {1: 80, 2: 10, 3: None, 9: 10}


def test_requests_are_rejected_while_no_version_of_the_rule_is_ready(server: Server) -> None:
    split(server, v8=1)
    with RawConnection(server.port) as connection:
        answer = connection.ask(post("/v2/models/versions/infer", infer_body({"IN": IN})))
        assert answer is not None
        assert (answer.status, "is split between versions" in answer.error) == (503, True)


def test_malformed_rules_and_unknown_models_are_rejected(server: Server) -> None:
    for model, body in (
        ("versions", {"weights": {"1": -1}}),
        ("versions", {"weight": {}}),
        ("other", {"weights": {"1": 1}}),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            change(server, "PUT", body, model)
        assert 400 <= caught.value.code < 500
        assert json.loads(caught.value.read())["error"]


def test_metrics_count_by_version_over_all_gateways(server: Server) -> None:
    split(server, v1=50, v2=50)

    def counts() -> Counter[str]:
        page = server.metrics_page().splitlines()
        lines = [line for line in page if line.startswith("weir_version_requests_total{")]
        return Counter({line.rpartition("} ")[0]: int(line.rpartition(" ")[2]) for line in lines})

    before = sum(counts().values())
    assert answered_by(server, 100)
    assert answered_by(server, 10, model_version="3")
    wait_until(lambda: sum(counts().values()) >= before + 110)  # some of earlier tests may come late
    assert any('version="3",arm="named"' in line for line in counts())
    page = server.metrics_page()
    assert 'weir_version_traffic_share{model="versions",version="1"} 0.5' in page
    assert "weir_version_duration_seconds_bucket{" in page


def weir(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**clean_environment(server.folder), "XDG_DATA_HOME": str(server.folder / "nothing")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "weir", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_command_sets_shows_and_clears(server: Server) -> None:
    url = f"--url={server.http_place}"
    done = weir(server, "traffic", "set", "versions", "1=90", "2=10", "--sticky=header:x-user", url)
    assert done.returncode == 0, done.stderr
    assert "versions: set by an operator, sticky by header:x-user" in done.stdout
    assert change(server)["by"].endswith("(http 127.0.0.1)")
    shown = json.loads(weir(server, "traffic", "show", "versions", "--json", url).stdout)
    assert shown["weights"] == {"1": 90, "2": 10}
    done = weir(server, "traffic", "set", "versions", "1=90", "7=10", url)
    assert done.returncode == 0
    assert "warning: version 7 of model 'versions' is not ready: others get its share" in done.stderr
    assert "no rule" in weir(server, "traffic", "clear", "versions", url).stdout
    assert weir(server, "traffic", "set", "versions", "1=x", url).returncode == 2
    assert weir(server, "traffic", "set", "nothing", "1=1", url).returncode == 1


def test_the_rule_of_the_configuration_applies_until_another_is_set(tmp_path: Path) -> None:
    parameters = 'parameters { key: "weir_traffic" value { string_value: "1=100" } }'
    write_versions(tmp_path / "models", "versions", "version_policy { all { } }\n" + parameters)
    server = Server(tmp_path, tmp_path / "models", f"--data-dir={tmp_path / 'data'}")
    try:
        assert answered_by(server, 5) == {"1": 5}
        assert change(server)["source"] == "config"
        split(server, v2=1)
        assert answered_by(server, 5) == {"2": 5}
        assert server.stop() == 0
        server = Server(tmp_path, tmp_path / "models", f"--data-dir={tmp_path / 'data'}")
        assert answered_by(server, 5) == {"2": 5}, "what was set survives a restart"
        change(server, "DELETE")
        assert answered_by(server, 5) == {"1": 5}
        server.kill("nats")
        assert wait_until(lambda: _try_split(server))["weights"] == {"3": 1}
        assert answered_by(server, 5) == {"3": 5}
        assert server.stop() == 0
    finally:
        server.close()


def _try_split(server: Server) -> Any:
    try:
        return split(server, v3=1)
    except urllib.error.HTTPError:
        return None  # 503: the broker is not back yet


SEQUENCES = """
version_policy { all { } }
sequence_batching { direct { } max_sequence_idle_microseconds: 60000000 control_input [
  { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
  { name: "END" control [{ kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] }] },
  { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] }] },
  { name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] }
] }
instance_group [{ count: 2 kind: KIND_CPU }]
"""


def test_a_sequence_stays_on_its_version_while_the_rule_changes(tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    tensors = {"INPUT": ("INT32", [1])}, {"OUTPUT": ("INT32", [1]), "INSTANCE": ("BYTES", [1])}
    folder = write_python_model(models, "sums", "accumulate", *tensors, 4, SEQUENCES)
    shutil.copytree(folder / "1", folder / "2")
    server = Server(tmp_path, models)
    ids = range(1, 9)
    versions: dict[int, set[str]] = {id: set() for id in ids}

    def step(client: Any, id: int, **flags: bool) -> int:
        inputs = http_inputs({"INPUT": np.array([[id]], np.int32)})
        result = client.infer("sums", inputs, sequence_id=id, **flags)
        versions[id].add(result.get_response()["model_version"])
        return int(result.as_numpy("OUTPUT")[0, 0])

    try:
        with server.http() as client:
            change(server, "PUT", {"weights": {"1": 50, "2": 50}}, "sums")
            assert [step(client, id, sequence_start=True) for id in ids] == list(ids)
            change(server, "PUT", {"weights": {"2": 100}}, "sums")
            assert [step(client, id) for id in ids] == [2 * id for id in ids]
            change(server, "PUT", {"weights": {"1": 100}}, "sums")
            assert [step(client, id, sequence_end=True) for id in ids] == [3 * id for id in ids]
        assert all(len(found) == 1 for found in versions.values())
        assert set.union(*versions.values()) == {"1", "2"}
        assert server.stop() == 0
    finally:
        server.close()
