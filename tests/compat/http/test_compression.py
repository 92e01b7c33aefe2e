"""Compressed bodies on the infer route, with the stock client and over raw HTTP."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from tests.support.clients.stock import RawConnection, http_inputs, post
from tests.support.models import zoo as model_zoo
from tests.support.models.http import serving
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

PATH = "/v2/models/same/infer"
COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress}
EXPAND = {"gzip": gzip.decompress, "deflate": zlib.decompress}
LENGTH = "inference-header-content-length"


def write_models(root: Path) -> None:
    model_zoo.write_identity(root, "same", "FP32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("compression"), write_models) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http_place}", timeout=30) as client:
        client.headers.pop("accept-encoding")
        yield client


def body(count: int = 3, **more: Any) -> bytes:
    data = [number / 4 for number in range(count)]
    return json.dumps(
        {"inputs": [{"name": "IN", "shape": [1, count], "datatype": "FP32", "data": data}], **more}
    ).encode()


def binary(values: np.ndarray) -> tuple[bytes, dict[str, str]]:
    """A request with a binary input that asks for binary outputs, and the header it wants."""
    row = {
        "name": "IN",
        "shape": [1, values.size],
        "datatype": "FP32",
        "parameters": {"binary_data_size": values.nbytes},
    }
    header = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
    return header + values.tobytes(), {LENGTH: str(len(header))}


@pytest.mark.parametrize("encoding", COMPRESS)
@pytest.mark.parametrize("count", [3, 200_000], ids=["in place", "in a thread"])
def test_a_request_in_json(http: httpx.Client, encoding: str, count: int) -> None:
    answer = http.post(PATH, content=COMPRESS[encoding](body(count)), headers={"content-encoding": encoding})
    assert answer.status_code == 200
    assert "content-encoding" not in answer.headers
    assert answer.json()["outputs"][0]["data"] == [number / 4 for number in range(count)]


@pytest.mark.parametrize("encoding", COMPRESS)
@pytest.mark.parametrize("count", [3, 1_000_000], ids=["in place", "in a thread"])
def test_tensors_both_ways(http: httpx.Client, encoding: str, count: int) -> None:
    values = np.arange(count, dtype=np.float32)
    content, headers = binary(values)
    headers |= {"content-encoding": encoding, "accept-encoding": encoding}
    with http.stream("POST", PATH, content=COMPRESS[encoding](content), headers=headers) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-encoding"] == encoding
    assert int(answer.headers["content-length"]) == len(raw)
    reply = EXPAND[encoding](raw)
    header_length = int(answer.headers[LENGTH])
    assert json.loads(reply[:header_length])["outputs"][0]["parameters"] == {"binary_data_size": values.nbytes}
    assert reply[header_length:] == values.tobytes()


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip, deflate, br, zstd", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("identity;q=0.5, gzip", "gzip"),
        ("gzip;q=0.5, identity;q=0.8", None),
        ("gzip;q=0", None),
        ("br", None),
        ("*", None),
    ],
)
def test_the_client_chooses(http: httpx.Client, accepted: str, encoding: str | None) -> None:
    for length in ({}, {LENGTH: str(len(body()))}):  # the second is of the kind that is prepared
        for _ in range(2):
            answer = http.post(PATH, content=body(), headers={"accept-encoding": accepted, **length})
            assert answer.headers.get("content-encoding") == encoding
            assert answer.json()["outputs"][0]["data"] == [0.0, 0.25, 0.5]


def test_a_prepared_request_with_and_without(http: httpx.Client) -> None:
    for number in range(4):
        values = np.array([number, 1], np.float32)
        content, headers = binary(values)
        accepted = {"accept-encoding": "gzip"} if number % 2 else {}
        answer = http.post(PATH, content=content, headers=headers | accepted)
        assert answer.headers.get("content-encoding") == ("gzip" if number % 2 else None)
        assert answer.content.endswith(values.tobytes())


def test_errors_and_other_routes_are_not_compressed(http: httpx.Client) -> None:
    accepted = {"accept-encoding": "gzip"}
    for answer in (
        http.post(PATH, content=b"{", headers=accepted),
        http.post("/v2/models/nowhere/infer", content=body(), headers=accepted),
        http.get("/v2", headers=accepted),
        http.get("/v2/models/same/config", headers=accepted),
    ):
        assert "content-encoding" not in answer.headers


def test_a_raw_request(http: httpx.Client) -> None:
    values = np.arange(5, dtype=np.float32).tobytes()
    headers = {"content-encoding": "gzip", LENGTH: "0"}
    answer = http.post(PATH, content=gzip.compress(values, mtime=0), headers=headers)
    assert answer.status_code == 200
    assert answer.content.endswith(values)


BROKEN = "encountered inconsistent stream state during decompression"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "nothing to be decompressed"),
        (b"neither gzip nor zlib", BROKEN),
        (body(), BROKEN),
        (gzip.compress(body(), mtime=0)[:-12], BROKEN),
        (zlib.compress(body())[: len(body()) // 3], BROKEN),
    ],
)
def test_what_can_not_be_decompressed(http: httpx.Client, content: bytes, text: str) -> None:
    answer = http.post(PATH, content=content, headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()) == (400, {"error": text})


@pytest.mark.parametrize("encoding", ["br", "x-gzip", "gzip, deflate"])
def test_another_encoding(http: httpx.Client, encoding: str) -> None:
    answer = http.post(PATH, content=body(), headers={"content-encoding": encoding})
    assert (answer.status_code, answer.json()) == (501, {"error": "Unsupported compression type"})
    assert answer.headers["accept-encoding"] == "gzip, deflate"


def test_a_bomb_goes_off_nowhere(server: Server, http: httpx.Client) -> None:
    stream = zlib.compressobj(1, zlib.DEFLATED, 31)
    bomb = b"".join([stream.compress(bytes(1 << 20)) for _ in range(256)]) + stream.flush()
    assert len(bomb) < 2 << 20
    answer = http.post(PATH, content=bomb, headers={"content-encoding": "gzip"})
    text = "exceeds the maximum allowed input size of 67108864 bytes. Use --http-max-input-size to increase the limit."
    assert answer.status_code == 400
    assert answer.json()["error"].endswith(text)
    assert http.post(PATH, content=body()).status_code == 200


def test_a_client_that_leaves_meanwhile(server: Server) -> None:
    compressed = gzip.compress(body(400_000), mtime=0)
    for _ in range(3):
        with RawConnection(server.port) as connection:
            connection.send(post(PATH, compressed, "Content-Encoding: gzip", "Accept-Encoding: gzip"))
    with RawConnection(server.port) as connection:
        answer = connection.ask(post(PATH, body()))
        assert answer is not None
        assert answer.status == 200
    wait_until(lambda: server.in_flight() == 0)


def test_pipelined_requests_keep_their_order(server: Server) -> None:
    large = gzip.compress(body(100_000, id="large"), mtime=0)
    with RawConnection(server.port) as connection:
        connection.send(
            post(PATH, large, "Content-Encoding: gzip", "Accept-Encoding: gzip") + post(PATH, body(id="small"))
        )
        first, second = connection.answer(), connection.answer()
    assert first is not None
    assert second is not None
    assert json.loads(gzip.decompress(first.body))["id"] == "large"
    assert second.document["id"] == "small"


@pytest.mark.parametrize("request_algorithm", ["gzip", "deflate", None])
@pytest.mark.parametrize("response_algorithm", ["gzip", "deflate", None])
def test_the_stock_client(server: Server, request_algorithm: str | None, response_algorithm: str | None) -> None:
    values = np.random.default_rng(5).random((1, 2000), np.float32)
    with server.http() as client:
        result = client.infer(
            "same",
            http_inputs({"IN": values}),
            outputs=[triton.InferRequestedOutput("OUT", binary_data=True)],
            request_compression_algorithm=request_algorithm,
            response_compression_algorithm=response_algorithm,
        )
    assert (result.as_numpy("OUT") == values).all()
