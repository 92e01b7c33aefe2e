"""One client's large request does not hold up a second client; the largest of each kind for less than 0.3 s."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import msgpack
import nats
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.models.zoo import write_identity, write_python_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

WORST_S = 0.3
MIB = 1 << 20
HTTP_BYTES = 60 * MIB
GRPC_BYTES = 200 * MIB
NATS_BYTES = 7_600_000
JSON_VALUES = 16_000_000  # of four bytes each, just below --http-max-input-size

SECOND_CLIENT = """
import socket, sys, time
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
body = b'{"inputs":[{"name":"IN","datatype":"INT32","shape":[1,1],"data":[1]}]}'
live = b"GET /v2/health/live HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n"
infer = b"POST /v2/models/small/infer HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body
worst_s = {live: 0.0, infer: 0.0}
sys.stdout.write("ready\\n"); sys.stdout.flush()
import select
while not select.select([sys.stdin], [], [], 0.01)[0]:
    for request in worst_s:
        began_s = time.monotonic()
        connection.sendall(request)
        answer = b""
        while b"\\r\\n\\r\\n" not in answer:
            answer += connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        head, _, rest = answer.partition(b"\\r\\n\\r\\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\\r")[0] or 0)
        while len(rest) < length:
            rest += connection.recv(65536)
        worst_s[request] = max(worst_s[request], time.monotonic() - began_s)
print(*worst_s.values())
"""
"""Asks all the time until its standard input ends, then prints its longest waits, each for another kind of request."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("large")
    models = folder / "models"
    write_identity(models, "small", "INT32")
    for datatype in ("BYTES", "FP32", "INT32", "UINT8"):
        write_identity(models, f"identity_{datatype}", datatype)
    write_python_model(models, "told", "echo", {"ANY": ("FP32", [1])}, {"TOLD": ("BYTES", [1])}, 4)
    with Server(folder, models, "--model-control-mode=explicit", "--load-model=*") as server:
        for name in ("small", "told"):
            wait_until(lambda name=name: server.is_ready(name))  # type: ignore[misc]
        with second_client(server):
            _post(server, "identity_INT32", _json("INT32", 300_000))  # starts the helper process
        yield server


@contextmanager
def second_client(server: Server) -> Iterator[dict[str, float]]:
    """A client in a process of its own; its longest waits are known at the end."""
    command = [sys.executable, "-c", SECOND_CLIENT, str(server.port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    worst_s: dict[str, float] = {}
    try:
        assert process.stdout.readline() == "ready\n"
        yield worst_s
        process.stdin.close()
        live, infer = process.stdout.readline().split()
        worst_s.update(live=float(live), infer=float(infer))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if not process.stdin.closed:
            process.stdin.close()


def _send(server: Server, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """The status, and how the body begins: of a long one the client does not look at all."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("POST", path, body, headers or {})
        response = connection.getresponse()
        start = response.read(300)
        buffer = bytearray(MIB)
        while response.readinto(buffer):
            pass
        return response.status, start
    finally:
        connection.close()


def _post(server: Server, model: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    return _send(server, f"/v2/models/{model}/infer", body, headers)


def _entry(datatype: str, count: int, **more: object) -> dict[str, object]:
    return {"name": "IN", "datatype": datatype, "shape": [1, count], **more}


def _json(datatype: str, count: int, value: bytes = b"1", **more: object) -> bytes:
    head = json.dumps({**more, "inputs": [_entry(datatype, count, data=[])]}).encode()
    return head.replace(b'"data": []', b'"data": [' + b",".join([value] * count) + b"]")


def _binary(datatype: str, count: int, content: bytes, **more: object) -> tuple[bytes, dict[str, str]]:
    document = {"inputs": [_entry(datatype, count, parameters={"binary_data_size": len(content)})], **more}
    head = json.dumps(document).encode()
    return head + content, {"Inference-Header-Content-Length": str(len(head))}


def bytes_over_http(server: Server) -> None:
    assert _post(server, "identity_BYTES", *_binary("BYTES", HTTP_BYTES // 4 + 1, bytes(HTTP_BYTES)))[0] == 400


def valid_bytes_over_http(server: Server) -> None:
    # More strings hold up the worker: its backend makes objects of all of them while it has the interpreter's lock.
    content, wish = bytes(4 * MIB), [{"name": "OUT", "parameters": {"binary_data": True}}]
    assert _post(server, "identity_BYTES", *_binary("BYTES", MIB, content, outputs=wish))[0] == 200


def floats_over_http(server: Server) -> None:
    content, wish = bytes(HTTP_BYTES), [{"name": "OUT", "parameters": {"binary_data": True}}]
    assert _post(server, "identity_FP32", *_binary("FP32", HTTP_BYTES // 4, content, outputs=wish))[0] == 200


def json_ints(server: Server) -> None:
    assert _post(server, "identity_INT32", _json("INT32", JSON_VALUES))[0] == 200


def json_floats(server: Server) -> None:
    assert _post(server, "identity_FP32", _json("FP32", 1_500_000, b"1.234567"))[0] == 200


def most_json_floats(server: Server) -> None:
    assert _post(server, "identity_FP32", _json("FP32", HTTP_BYTES // 9, b"1.234567"))[0] == 200


def json_strings(server: Server) -> None:
    assert _post(server, "identity_BYTES", _json("BYTES", 1_000_000, b'""'))[0] == 200


def nested_json(server: Server) -> None:
    count = 2_400_000
    body = b'{"inputs":[{"name":"IN","datatype":"INT32","shape":[1,%d],"data":[' % count
    assert _post(server, "identity_INT32", body + b",".join([b"[1]"] * count) + b"]}]}")[0] == 200


def most_parameters(server: Server) -> None:
    many_parameters(server, 2_400_000)


def many_parameters(server: Server, count: int = 500_000) -> None:
    parameters = b",".join(b'"%d":1' % number for number in range(count))
    body = b'{"parameters":{' + parameters + b"}," + _json("INT32", 1)[1:]
    assert _post(server, "identity_INT32", body)[0] == 400


def most_floats_as_json(server: Server) -> None:
    floats_as_json(server, HTTP_BYTES // 4)


def floats_as_json(server: Server, count: int = 4_000_000) -> None:
    content = np.arange(count, dtype=np.float32) * np.float32(0.7)
    assert _post(server, "identity_FP32", *_binary("FP32", len(content), content.tobytes()))[0] == 200


def strings_as_json(server: Server) -> None:
    assert _post(server, "identity_BYTES", *_binary("BYTES", MIB, bytes(4 * MIB)))[0] == 200


def classes(server: Server) -> None:
    content = np.arange(1_000_000, dtype=np.float32)
    wish = [{"name": "OUT", "parameters": {"classification": 1_000_000}}]
    assert _post(server, "identity_FP32", *_binary("FP32", len(content), content.tobytes(), outputs=wish))[0] == 200


def generate(server: Server) -> None:
    body = b'{"ANY": 1, "junk": [' + b",".join([b"1"] * (HTTP_BYTES // 2)) + b"]}"
    assert _send(server, "/v2/models/told/generate", body)[0] == 400


def generate_members(server: Server) -> None:
    body = b'{"ANY": 1,' + b",".join(b'"%d":1' % number for number in range(2_400_000)) + b"}"
    assert _send(server, "/v2/models/told/generate", body)[0] == 400


def load_with_a_file(server: Server) -> None:
    body = json.dumps({"parameters": {"config": "{}", "file:1/model.onnx": "A" * (HTTP_BYTES - 1000)}}).encode()
    assert _send(server, "/v2/repository/models/unknown/load", body)[0] in (400, 500)


def settings_of_many_members(server: Server) -> None:
    body = b"{" + b",".join(b'"%d":1' % number for number in range(2_400_000)) + b"}"
    assert _send(server, "/v2/logging", body)[0] == 400


def answered_later(server: Server) -> None:
    body = _json("INT32", JSON_VALUES)
    assert _send(server, "/v2/models/identity_INT32/infer", body, {"Prefer": "respond-async"})[0] == 202


def _call(server: Server, request: service_pb2.ModelInferRequest) -> grpc.StatusCode:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc_place, options) as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=120)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


def _message(datatype: str, count: int) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=f"identity_{datatype}")
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = "IN", datatype
    tensor.shape.extend([1, count])
    return request


def bytes_over_grpc(server: Server) -> None:
    request = _message("BYTES", GRPC_BYTES // 4 + 1)
    request.raw_input_contents.append(bytes(GRPC_BYTES))
    assert _call(server, request) is grpc.StatusCode.INVALID_ARGUMENT


def floats_over_grpc(server: Server) -> None:
    request = _message("FP32", GRPC_BYTES // 4)
    request.raw_input_contents.append(bytes(GRPC_BYTES))
    assert _call(server, request) in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


def typed_ints_over_grpc(server: Server) -> None:
    request = _message("INT32", 15 * MIB)
    request.inputs[0].contents.int_contents.extend(np.ones(15 * MIB, np.int32).tolist())
    assert _call(server, request) in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)


def typed_strings_over_grpc(server: Server) -> None:
    # One more than there are: for a model that runs in the worker, ten million strings hold up the worker itself.
    request = _message("BYTES", 10_000_001)
    request.inputs[0].contents.bytes_contents.extend([b""] * 10_000_000)
    assert _call(server, request) is grpc.StatusCode.INVALID_ARGUMENT


def many_parameters_over_grpc(server: Server) -> None:
    request = _message("INT32", 1)
    for number in range(1_000_000):
        request.parameters[str(number)].int64_param = 1
    assert _call(server, request) is grpc.StatusCode.INVALID_ARGUMENT


def many_inputs_over_grpc(server: Server) -> None:
    request = _message("INT32", 1)
    for _ in range(3_000_000):
        request.inputs.add()
    assert _call(server, request) is grpc.StatusCode.INVALID_ARGUMENT


def classes_over_grpc(server: Server) -> None:
    request = _message("FP32", 1_000_000)
    request.raw_input_contents.append(np.arange(1_000_000, dtype=np.float32).tobytes())
    output = request.outputs.add()
    output.name = "OUT"
    output.parameters["classification"].int64_param = 1_000_000
    assert _call(server, request) is grpc.StatusCode.OK


def _ask_over_nats(server: Server, model: str, body: bytes, is_msgpack: bool = True) -> bytes:
    async def ask() -> bytes:
        client = await nats.connect(server.nats_url)
        headers = {"Content-Type": "application/msgpack"} if is_msgpack else None
        try:
            return bytes((await client.request(f"infer.{model}", body, 60, headers=headers)).data)
        finally:
            await client.close()

    return asyncio.run(ask())


def msgpack_bytes_over_nats(server: Server) -> None:
    count = NATS_BYTES // 4
    body = msgpack.packb({"inputs": [_entry("BYTES", count + 1, data=bytes(4 * count))]})
    assert b"string elements" in _ask_over_nats(server, "identity_BYTES", body)


def msgpack_ints_over_nats(server: Server) -> None:
    count = 4_900_000
    body = msgpack.packb({"inputs": [_entry("INT32", count + 1, data=[1] * count)]})
    assert b"error" in _ask_over_nats(server, "identity_INT32", body)


def msgpack_nested_over_nats(server: Server) -> None:
    body = b"\x81\xa6inputs" + b"\x91" * 7_000_000 + b"\xc0"
    assert b"nested" in _ask_over_nats(server, "identity_INT32", body)


def json_over_nats(server: Server) -> None:
    body = b'{"inputs":' + b"[" * 3_900_000 + b"]" * 3_900_000 + b"}"
    assert b"error" in _ask_over_nats(server, "identity_INT32", body, is_msgpack=False)


Attack = Callable[[Server], None]
ATTACKS: list[Attack] = [
    bytes_over_http,
    bytes_over_grpc,
    json_floats,
    floats_as_json,
    many_parameters,
    msgpack_bytes_over_nats,
    msgpack_ints_over_nats,
    most_json_floats,
    most_parameters,
    most_floats_as_json,
    valid_bytes_over_http,
    floats_over_http,
    floats_over_grpc,
    json_ints,
    json_strings,
    nested_json,
    strings_as_json,
    classes,
    generate,
    generate_members,
    load_with_a_file,
    settings_of_many_members,
    answered_later,
    typed_ints_over_grpc,
    typed_strings_over_grpc,
    many_parameters_over_grpc,
    many_inputs_over_grpc,
    classes_over_grpc,
    msgpack_nested_over_nats,
    json_over_nats,
]


@pytest.mark.timing
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_second_client_is_served_soon(gateway: Server, attack: Attack) -> None:
    with second_client(gateway) as worst_s:
        attack(gateway)
    assert max(worst_s.values()) < WORST_S, worst_s


def moderate_json_over_http(server: Server) -> None:
    assert _post(server, "identity_INT32", _json("INT32", 300_000))[0] == 200


def moderate_floats_as_json(server: Server) -> None:
    floats_as_json(server, 300_000)


def moderate_generate(server: Server) -> None:
    body = b'{"ANY": 1, "junk": [' + b",".join([b"1"] * 300_000) + b"]}"
    assert _send(server, "/v2/models/told/generate", body)[0] == 400


def moderate_ints_over_grpc(server: Server) -> None:
    request = _message("INT32", 300_000)
    request.inputs[0].contents.int_contents.extend([1] * 300_000)
    assert _call(server, request) is grpc.StatusCode.OK


def moderate_msgpack_over_nats(server: Server) -> None:
    body = msgpack.packb({"inputs": [_entry("INT32", 300_001, data=[1] * 300_000)]})
    assert b"error" in _ask_over_nats(server, "identity_INT32", body)


MODERATE: list[Attack] = [
    moderate_json_over_http,
    moderate_floats_as_json,
    moderate_generate,
    moderate_ints_over_grpc,
    moderate_msgpack_over_nats,
]


@contextmanager
def helpers_stand_still(server: Server) -> Iterator[None]:
    """While the processes that read and write documents do nothing."""
    helpers = [process for process in server.processes() if "weir.runtime.offload_process" in process.cmdline()]
    assert helpers
    for helper in helpers:
        helper.suspend()
    try:
        yield
    finally:
        for helper in helpers:
            helper.resume()


def has_job(server: Server) -> bool:
    """Whether the gateway waits for a helper process."""
    files = Path(f"/proc/{server.pids()['gateway']}/fd").iterdir()
    with contextlib.suppress(FileNotFoundError):  # one that was closed meanwhile
        return any("weir-job" in str(file.readlink()) for file in files)
    return False


@pytest.mark.parametrize("attack", MODERATE, ids=lambda attack: attack.__name__)
def test_a_second_client_is_served_while_a_document_is_read_or_written(gateway: Server, attack: Attack) -> None:
    with ThreadPoolExecutor(1) as pool:
        with helpers_stand_still(gateway):
            asking = pool.submit(attack, gateway)
            wait_until(lambda: has_job(gateway) or asking.done())
            for _ in range(3):
                assert _post(gateway, "small", _json("INT32", 1))[0] == 200
            assert not asking.done()
        asking.result()


def test_what_follows_a_large_request_on_its_connection_waits_for_it(gateway: Server) -> None:
    large, small = _json("INT32", 400_000, id="large"), _json("INT32", 1, id="small")
    head = "POST /v2/models/identity_INT32/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), 60) as connection, connection.makefile("rb") as answers:
        for body in (large, small):
            connection.sendall((head % len(body)).encode() + body)
        ids = []
        for _ in range(2):
            lengths = [int(line.split(b":")[1]) for line in iter(answers.readline, b"\r\n") if b"Length" in line]
            ids.append(json.loads(answers.read(lengths[0]))["id"])
    assert ids == ["large", "small"]


def test_what_follows_a_large_request_on_its_stream_waits_for_it(gateway: Server) -> None:
    large, small = _message("INT32", 400_000), _message("INT32", 1)
    for request, count in ((large, 400_000), (small, 1)):
        request.id = str(count)
        request.inputs[0].contents.int_contents.extend([1] * count)
    with grpc.insecure_channel(gateway.grpc_place) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([large, small, large, small]), timeout=60))
    assert [answer.infer_response.id for answer in answers] == ["400000", "1"] * 2


def test_the_lag_of_every_role_is_measured(gateway: Server) -> None:
    page = gateway.metrics_page()
    roles = {line.partition('role="')[2].partition('"')[0] for line in page.splitlines() if "loop_lag_seconds{" in line}
    assert roles == {"gateway", "scheduler", "worker", "durable"}
