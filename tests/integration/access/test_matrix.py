"""Every kind of principal tries every action at every door of a real server: each does what the policy says, and no more.

What is expected is computed from the policy alone, by reading its rules one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import grpc
import httpx
import jwt
import nats
import numpy as np
import pytest
import tritonclient.grpc
import yaml
from cryptography.hazmat.primitives.asymmetric import ed25519
from jwt.algorithms import OKPAlgorithm
from tritonclient.utils import InferenceServerException

from tests.support.access.served import weir
from tests.support.models.zoo import write_identity
from tests.support.servers.certificates import Authority, KeyPair
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.access.policy.actions import Action
from weir.bus.nats.connection import Bus
from weir.calls.gateway_api import GatewayApi
from weir.gateway.grpc.weir_service import message_type
from weir.schemas.kserve.triton_messages import messages

ISSUER, AUDIENCE = "https://issuer.test", "weir"
OPEN, SECRET = "open_net", "secret_net"

POLICY: dict[str, Any] = {
    "roles": {
        "anonymous": {"rules": [{"actions": ["health"]}]},
        "caller": {"rules": [{"model": "open_*", "actions": ["infer", "metadata", "statistics"]}]},
        "loader": {"rules": [{"model": OPEN, "versions": [1], "actions": ["load", "traffic"]}, {"actions": ["jobs"]}]},
        "watcher": {"rules": [{"actions": ["metrics", "console-read", "logs", "trace", "statistics"]}]},
        "operator": {"rules": [{"actions": ["*"]}]},
    },
    "tokens": [{"issuer": ISSUER, "audience": AUDIENCE, "keys": "issuer.json"}],
    "certificates": [{"subject": "CN=camera", "principal": "camera", "roles": ["caller"]}],
}


class Who(NamedTuple):
    """A principal: what it shows, and the roles that this should prove; None where it should let nobody in."""

    name: str
    header: str = ""
    certificate: KeyPair | None = None
    roles: frozenset[str] | None = frozenset()


@dataclass
class World:
    server: Server
    authority: Authority
    key_of: Callable[[str], str]
    console: str
    issuer: ed25519.Ed25519PrivateKey
    principals: dict[str, Who] = field(default_factory=dict)


def token(key: ed25519.Ed25519PrivateKey, **claims: Any) -> str:
    said = {"iss": ISSUER, "aud": AUDIENCE, "sub": "bob", "roles": ["caller"], "exp": time.time() + 600}
    return jwt.encode({**said, **claims}, key, "EdDSA", {"kid": "k"})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("matrix")
    for name in (OPEN, SECRET):
        write_identity(folder / "models", name, "FP32")
    authority = Authority(folder)
    pair, camera, stranger = (authority.sign(name) for name in ("server", "camera", "stranger"))
    issuer, foreign = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    row = {**OKPAlgorithm.to_jwk(issuer.public_key(), as_dict=True), "kid": "k"}
    (folder / "issuer.json").write_text(json.dumps({"keys": [row]}))
    (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
    options = [
        "--model-control-mode=explicit",
        "--load-model=*",
        "--console-port=0",
        "--console-allow-changes",
        f"--batch-root={folder / 'batch'}",
        f"--access-policy={folder / 'policy.yaml'}",
        f"--tls-cert={pair.cert}",
        f"--tls-key={pair.key}",
        f"--tls-client-ca={authority.cert}",
        "--tls-client-auth=request",
    ]
    (folder / "batch").mkdir()
    with Server(folder, folder / "models", *options) as server:

        def key_of(role: str) -> str:
            made = weir(folder, "key", "create", f"{role}-key", f"--role={role}", f"--nats={server.nats_url}")
            assert made.returncode == 0, made.stderr
            return str(made.stdout.strip())

        world = World(server, authority, key_of, server.printed_value("console"), issuer)
        keys = {role: key_of(role) for role in ("caller", "loader", "watcher", "operator", "nothing")}
        everybody = [
            Who("nobody"),
            *(Who(f"key of {role}", f"Bearer {key}", roles=frozenset([role])) for role, key in keys.items()),
            Who("unknown key", "Bearer weir_0000000000_" + "x" * 43, roles=None),
            Who("no key", "Bearer", roles=None),
            Who("token", f"Bearer {token(issuer)}", roles=frozenset(["caller"])),
            Who("foreign token", f"Bearer {token(foreign)}", roles=None),
            Who("expired token", f"Bearer {token(issuer, exp=time.time() - 600)}", roles=None),
            Who("token for others", f"Bearer {token(issuer, aud='others')}", roles=None),
            Who("certificate", certificate=camera, roles=frozenset(["caller"])),
            Who("unknown certificate", certificate=stranger),
            Who("certificate and bad key", "Bearer weir_x_y", camera, None),
        ]
        world.principals = {who.name: who for who in everybody}
        operator = world.principals["key of operator"]
        wait_until(lambda: http_answer(world, operator, "GET", "/v2", "") == "allowed")
        yield world


def rules_of(roles: frozenset[str]) -> list[dict[str, Any]]:
    return [rule for role in (*roles, "anonymous") for rule in POLICY["roles"].get(role, {}).get("rules", ())]


def grants(rule: dict[str, Any], action: Action) -> bool:
    return bool({action.value, "*"} & set(rule["actions"]))


def expected(who: Who, action: Action, model: str, is_list: bool) -> str:
    """What the policy says, from its rules one by one."""
    if who.roles is None:
        return "unauthenticated"
    rules = rules_of(who.roles)
    of_model = [rule for rule in rules if model and fnmatchcase(model, rule.get("model", "*"))]
    if is_list:
        fitting = rules
    elif model:
        fitting = [rule for rule in of_model if 1 in rule.get("versions", [1])]
    else:
        fitting = [rule for rule in rules if rule.get("model", "*") == "*" and "versions" not in rule]
    if any(grants(rule, action) for rule in fitting):
        return "allowed"
    proved = bool(who.header) or (who.certificate is not None and who.name == "certificate")
    if not proved:
        return "unauthenticated"
    on_models = {each.value for each in Action if each.is_of_model} - {"health"} | {"*"}
    knows = any(on_models & set(rule["actions"]) for rule in of_model)
    return "hidden" if model and not knows else "denied"


# Doors

_OF_STATUS = {401: "unauthenticated", 403: "denied"}


def client_context(world: World, who: Who) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=world.authority.cert)
    if who.certificate is not None:
        context.load_cert_chain(*who.certificate)
    return context


def http_answer(world: World, who: Who, method: str, path: str, model: str, place: str = "", **more: Any) -> str:
    headers = {**more.pop("headers", {}), **({"authorization": who.header} if who.header else {})}
    base = place or f"https://{world.server.http_place}"
    with httpx.Client(verify=client_context(world, who), timeout=30.0) as client:
        answer = client.request(method, base + path.replace("{model}", model), headers=headers, **more)
    if answer.status_code == 401:
        assert answer.headers["www-authenticate"].startswith("Bearer")
    return classified(answer.status_code, answer.text, model)


def classified(status: int, text: str, model: str) -> str:
    if status == 404 and f"Request for unknown model: '{model}' is not found" in text:
        return "hidden"
    return _OF_STATUS.get(status, "allowed")


def infer_body(model: str) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [0.0] * 4}]}


def grpc_answer(world: World, who: Who, method: str, request: Any, model: str) -> str:
    pair = who.certificate
    credentials = grpc.ssl_channel_credentials(
        world.authority.pem,
        None if pair is None else pair.key.read_bytes(),
        None if pair is None else pair.cert.read_bytes(),
    )
    metadata = [("authorization", who.header)] if who.header else []
    with grpc.secure_channel(world.server.grpc_place.replace("127.0.0.1", "localhost"), credentials) as channel:
        call = channel.unary_unary(method, type(request).SerializeToString, lambda data: data)
        try:
            call(request, metadata=metadata, timeout=30.0)
        except grpc.RpcError as error:
            return of_code(error.code(), error.details(), model)
    return "allowed"


def of_code(code: grpc.StatusCode, details: str, model: str) -> str:
    if code is grpc.StatusCode.NOT_FOUND and details == f"Request for unknown model: '{model}' is not found":
        return "hidden"
    found = {grpc.StatusCode.UNAUTHENTICATED: "unauthenticated", grpc.StatusCode.PERMISSION_DENIED: "denied"}
    return found.get(code, "allowed")


def stream_answer(world: World, who: Who, model: str) -> str:
    """One request on a stream of the stock client."""
    pair = who.certificate
    outcome: list[Any] = []
    client = tritonclient.grpc.InferenceServerClient(
        world.server.grpc_place.replace("127.0.0.1", "localhost"),
        ssl=True,
        root_certificates=str(world.authority.cert),
        private_key=None if pair is None else str(pair.key),
        certificate_chain=None if pair is None else str(pair.cert),
    )
    with client:
        headers = {"authorization": who.header} if who.header else None
        client.start_stream(lambda result, error: outcome.append(error or result), headers=headers)
        tensor = tritonclient.grpc.InferInput("IN", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
        with contextlib.suppress(InferenceServerException):  # the stream is refused already
            client.async_stream_infer(model, [tensor])
        wait_until(lambda: bool(outcome))
        client.stop_stream(cancel_requests=True)
    (first,) = outcome[:1]
    if not isinstance(first, Exception):
        return "allowed"
    text = str(first)
    if "UNAUTHENTICATED" in text or "show a key" in text:
        return "unauthenticated"
    if f"Request for unknown model: '{model}' is not found" in text:
        return "hidden"
    return "denied" if "no rule allows" in text else "allowed"


def nats_answer(world: World, who: Who, model: str) -> str:
    async def ask() -> tuple[int, str]:
        client = await nats.connect(world.server.nats_url)
        try:
            headers = {"Authorization": who.header} if who.header else None
            answer = await client.request(
                f"infer.{model}", json.dumps(infer_body(model)).encode(), timeout=30, headers=headers
            )
        finally:
            await client.close()
        return int((answer.headers or {}).get("Nats-Service-Error-Code", 200)), answer.data.decode()

    return classified(*asyncio.run(ask()), model)


def bus_answer(world: World, who: Who, method: str, path: str, model: str) -> str:
    """A request of the HTTP API over the bus, as the console and commands send them."""

    async def ask() -> tuple[int, str]:
        async with asyncio.TaskGroup() as background:
            bus = await Bus.connect(world.server.nats_url, "matrix", background)
            api = GatewayApi(bus, "matrix")
            await api.start()
            headers = {"authorization": who.header} if who.header else {}
            answer = await api.request(method, path.replace("{model}", model), headers)
            await bus.close()
        return answer.status, answer.body.decode()

    return classified(*asyncio.run(ask()), model)


class Try(NamedTuple):
    """One way to do an action."""

    action: Action
    door: str
    run: Callable[[World, Who, str], str]
    has_model: bool = True
    is_list: bool = False


def by_http(action: Action, method: str, path: str, *, is_list: bool = False, **more: Any) -> Try:
    return Try(
        action,
        f"HTTP {method} {path}",
        lambda world, who, model: http_answer(world, who, method, path, model, **more),
        "{model}" in path,
        is_list,
    )


def by_bus(action: Action, method: str, path: str, *, is_list: bool = False) -> Try:
    return Try(
        action,
        f"bus {method} {path}",
        lambda world, who, model: bus_answer(world, who, method, path, model),
        "{model}" in path,
        is_list,
    )


def by_grpc(action: Action, name: str, model_field: str = "", *, is_list: bool = False) -> Try:
    def run(world: World, who: Who, model: str) -> str:
        if "/" in name:
            return grpc_answer(world, who, name, message_type("TrafficRequest")(model=model), model)
        request = getattr(messages, f"{name}Request")(**({model_field: model} if model_field else {}))
        return grpc_answer(world, who, f"/inference.GRPCInferenceService/{name}", request, model)

    return Try(action, f"gRPC {name}", run, bool(model_field), is_list)


def by_console(action: Action, method: str, path: str, *, is_list: bool = False) -> Try:
    def run(world: World, who: Who, model: str) -> str:
        return http_answer(world, who, method, path, model, world.console, headers={"x-weir-console": "1"})

    return Try(action, f"console {method} {path}", run, False, is_list)


def metrics(world: World, who: Who, model: str) -> str:
    return http_answer(world, who, "GET", "/metrics", model, f"https://{world.server.metrics_place}")


TRIES = [
    by_http(Action.HEALTH, "GET", "/v2/health/ready"),
    by_http(Action.HEALTH, "GET", "/v2/models/{model}/ready"),
    by_http(Action.METADATA, "GET", "/v2", is_list=True),
    by_http(Action.METADATA, "GET", "/v2/models/{model}"),
    by_http(Action.METADATA, "GET", "/v2/models/{model}/config"),
    by_http(Action.METADATA, "POST", "/v2/repository/index", is_list=True),
    by_http(Action.METADATA, "GET", "/openapi.json"),
    by_http(Action.INFER, "POST", "/v2/models/{model}/infer", json=infer_body("")),
    by_http(Action.INFER, "POST", "/v2/models/{model}/versions/1/infer", json=infer_body("")),
    by_http(Action.INFER, "POST", "/v2/models/{model}/generate", json={"IN": [0.0] * 4}),
    by_http(Action.INFER, "POST", "/v2/models/{model}/infer", json=infer_body(""), headers={"prefer": "respond-async"}),
    by_http(Action.STATISTICS, "GET", "/v2/models/{model}/stats"),
    by_http(Action.STATISTICS, "GET", "/v2/models/stats", is_list=True),
    by_http(Action.LOAD, "POST", "/v2/repository/models/{model}/load"),
    by_http(Action.LOAD, "GET", "/v2/models/{model}/history"),
    by_http(Action.TRAFFIC, "GET", "/v2/models/{model}/traffic"),
    by_http(Action.TRACE, "GET", "/v2/models/{model}/trace/setting"),
    by_http(Action.TRACE, "GET", "/v2/trace/setting"),
    by_http(Action.LOGS, "GET", "/v2/logging"),
    by_http(Action.SHARED_MEMORY, "GET", "/v2/systemsharedmemory/status"),
    by_http(Action.JOBS, "GET", "/v2/jobs", is_list=True),
    Try(Action.METRICS, "metrics", metrics, has_model=False),
    by_grpc(Action.HEALTH, "ServerReady"),
    by_grpc(Action.HEALTH, "ModelReady", "name"),
    by_grpc(Action.METADATA, "ServerMetadata", is_list=True),
    by_grpc(Action.METADATA, "ModelMetadata", "name"),
    by_grpc(Action.METADATA, "ModelConfig", "name"),
    by_grpc(Action.METADATA, "RepositoryIndex", is_list=True),
    by_grpc(Action.INFER, "ModelInfer", "model_name"),
    Try(Action.INFER, "gRPC stream", stream_answer),
    by_grpc(Action.STATISTICS, "ModelStatistics", "name"),
    by_grpc(Action.LOAD, "RepositoryModelLoad", "model_name"),
    by_grpc(Action.TRAFFIC, "/weir.v1.TrafficService/GetTraffic", "model"),
    by_grpc(Action.TRACE, "TraceSetting", "model_name"),
    by_grpc(Action.LOGS, "LogSettings"),
    by_grpc(Action.SHARED_MEMORY, "SystemSharedMemoryStatus"),
    Try(Action.INFER, "NATS infer", nats_answer),
    by_bus(Action.METADATA, "GET", "/v2/models/{model}"),
    by_bus(Action.LOAD, "POST", "/v2/repository/models/{model}/load"),
    by_bus(Action.LOGS, "GET", "/v2/logging"),
    by_bus(Action.JOBS, "GET", "/v2/jobs", is_list=True),
    by_console(Action.CONSOLE_READ, "GET", "/"),
    by_console(Action.CONSOLE_READ, "GET", "/api/status"),
    by_console(Action.DEAD_LETTERS, "GET", "/api/dead", is_list=True),
]

WITHOUT_CERTIFICATES = ("NATS", "bus")
"""Doors at which a client has no connection of its own to the server."""

PRINCIPALS = [
    "nobody",
    *(f"key of {role}" for role in ("caller", "loader", "watcher", "operator", "nothing")),
    "unknown key",
    "no key",
    "token",
    "foreign token",
    "expired token",
    "token for others",
    "certificate",
    "unknown certificate",
    "certificate and bad key",
]


@pytest.mark.parametrize("each", TRIES, ids=lambda each: each.door)
def test_every_principal_may_do_what_the_policy_says(each: Try, world: World) -> None:
    wrong, tried = {}, set()
    for name in PRINCIPALS:
        who = world.principals[name]
        if who.certificate is not None and each.door.startswith(WITHOUT_CERTIFICATES):
            continue
        for model in (OPEN, SECRET, "no_such_net") if each.has_model else ("",):
            wanted = expected(who, each.action, model, each.is_list)
            if wanted == "allowed" and model == "no_such_net":
                continue  # the server may answer as it likes
            found = each.run(world, who, model)
            tried.add(wanted)
            if found != wanted:
                wrong[name, model] = f"{found}, not {wanted}"
    assert wrong == {}
    assert {"allowed", "unauthenticated"} <= tried


def test_what_is_changed_in_the_console_is_decided_by_both_doors(world: World) -> None:
    """The console lets in who may change things there; the gateway decides about the model, for the same principal."""
    path = f"/api/models/{OPEN}/load"
    headers = {"x-weir-console": "1"}
    found = {
        name: http_answer(world, world.principals[name], "POST", path, OPEN, world.console, headers=headers)
        for name in ("nobody", "key of loader", "key of watcher", "key of operator")
    }
    assert found == {
        "nobody": "unauthenticated",
        "key of loader": "denied",
        "key of watcher": "denied",
        "key of operator": "allowed",
    }


def test_lists_hold_what_a_principal_may_see(world: World) -> None:
    who = world.principals["key of caller"]
    with httpx.Client(verify=client_context(world, who), headers={"authorization": who.header}) as client:
        base = f"https://{world.server.http_place}"
        index = client.post(f"{base}/v2/repository/index").json()
        stats = client.get(f"{base}/v2/models/stats").json()["model_stats"]
    assert ({row["name"] for row in index}, {row["name"] for row in stats}) == ({OPEN}, {OPEN})
