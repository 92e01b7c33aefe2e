"""HTTP framing below KServe: what is accepted on a connection, and what is rejected."""

import json
import random
import threading

import pytest

from tests.support.clients.stock import Answer, RawConnection, post
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

PATH = "/v2/models/bare/infer"


def body(value: float) -> bytes:
    row = {"name": "IN", "shape": [1, 3], "datatype": "FP32", "data": [value, 0, 1]}
    return json.dumps({"inputs": [row], "id": str(value)}).encode()


def is_answer_to(value: float, answer: Answer | None) -> bool:
    return answer is not None and answer.status == 200 and answer.document["id"] == str(value)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def assert_serves(server: Server) -> None:
    with RawConnection(server.port) as connection:
        assert is_answer_to(5.0, connection.ask(post(PATH, body(5.0))))


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with RawConnection(server.port) as connection:
        connection.send(
            post(PATH, body(1.0))
            + get("/v2/health/live")
            + post(PATH, b"{")
            + post(PATH, body(2.0))
            + get("/v2")
            + get("/v2/nothing")
            + post(PATH, body(3.0))
        )
        answers = [connection.answer() for _ in range(7)]
    assert is_answer_to(1.0, answers[0])
    assert [answer.status if answer else None for answer in answers] == [200, 200, 500, 200, 200, 404, 200]
    assert answers[4] is not None
    assert answers[4].document["name"] == "triton"
    assert is_answer_to(2.0, answers[3])
    assert is_answer_to(3.0, answers[6])


def test_many_pipelined_requests(server: Server) -> None:
    with RawConnection(server.port) as connection:
        connection.send(b"".join(post(PATH, body(float(number))) for number in range(100)))
        for number in range(100):
            assert is_answer_to(float(number), connection.answer())


def test_a_request_in_small_pieces(server: Server) -> None:
    request = post(PATH, body(1.0))
    with RawConnection(server.port) as connection:
        for position in range(len(request)):
            connection.send(request[position : position + 1])
        assert is_answer_to(1.0, connection.answer())


def test_expect_100_continue(server: Server) -> None:
    content = body(1.0)
    for large in (False, True):
        padded = content + b" " * (100_000 * large)
        with RawConnection(server.port) as connection:
            connection.send(post(PATH, b"", "Expect: 100-continue", length=len(padded)))
            interim = connection.answer()
            assert interim is not None
            assert interim.status == 100
            connection.send(padded)
            assert is_answer_to(1.0, connection.answer())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunked_bodies(server: Server, size: int) -> None:
    content = body(1.0)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    request = head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    with RawConnection(server.port) as connection:
        assert is_answer_to(1.0, connection.ask(request))
        assert is_answer_to(2.0, connection.ask(post(PATH, body(2.0))))


def test_a_connection_is_kept_until_one_side_has_enough(server: Server) -> None:
    with RawConnection(server.port) as connection:
        for number in range(20):
            assert is_answer_to(float(number), connection.ask(post(PATH, body(float(number)))))
        last = connection.ask(post(PATH, body(7.0), "Connection: close"))
        assert is_answer_to(7.0, last)
        assert last is not None
        assert last.headers["connection"] == "close"
        assert connection.is_closed()


def test_http_1_0(server: Server) -> None:
    with RawConnection(server.port) as connection:
        assert is_answer_to(1.0, connection.ask(post(PATH, body(1.0), version="1.0")))
        assert connection.is_closed()


@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", "/v2/models/bare"])
def test_head(server: Server, path: str) -> None:
    with RawConnection(server.port) as connection:
        connection.send(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = connection.answer(has_body=False)
        assert answer is not None
        assert answer.status in (200, 405)
        assert is_answer_to(1.0, connection.ask(post(PATH, body(1.0))))


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "GET"])
def test_another_verb(server: Server, method: str) -> None:
    with RawConnection(server.port) as connection:
        answer = connection.ask(post(PATH, body(1.0)).replace(b"POST", method.encode(), 1))
        assert answer is not None
        assert (answer.status, answer.error) == (405, "Method Not Allowed")
        assert is_answer_to(1.0, connection.ask(post(PATH, body(1.0))))


def test_a_post_where_only_get_is_known(server: Server) -> None:
    with RawConnection(server.port) as connection:
        answer = connection.ask(post("/v2/models/bare", b"{}"))
        assert answer is not None
        assert (answer.status, answer.error) == (405, "Method Not Allowed")


MALFORMED = {
    "two lengths": b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "length and chunks": b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "length that is no number": b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n",
    "length beyond 64 bits": b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "bad chunk size": b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "chunk beyond 64 bits": b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff1\r\n",
    "bad chunk end": b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{xx",
    "no version": b"POST %s\r\n\r\n",
    "space in a header's name": b"POST %s HTTP/1.1\r\nHo st: x\r\n\r\n",
    "a header without a colon": b"POST %s HTTP/1.1\r\nHost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 %s",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n %s",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_http_ends_its_connection_only(server: Server, case: str) -> None:
    with RawConnection(server.port) as other:
        assert is_answer_to(1.0, other.ask(post(PATH, body(1.0))))
        with RawConnection(server.port) as connection:
            answer = connection.ask(MALFORMED[case] % PATH.encode())
            assert answer is None or answer.status == 400
            assert answer is None or connection.is_closed()
        assert is_answer_to(2.0, other.ask(post(PATH, body(2.0))))


def test_malformed_http_behind_a_good_request(server: Server) -> None:
    with RawConnection(server.port) as connection:
        connection.send(post(PATH, body(1.0)) + b"\0\0\0\r\n\r\n")
        answer = connection.answer()
        assert answer is None or answer.status in (200, 400)
    assert_serves(server)
    wait_until(lambda: server.in_flight() == 0)


@pytest.mark.parametrize("path", ["/v2/models/bare/infer", "/v2/health/ready"])
def test_headers_without_end(server: Server, path: str) -> None:
    with RawConnection(server.port) as connection:
        connection.send(f"POST {path} HTTP/1.1\r\nHost: x\r\n".encode())
        try:
            for number in range(2_000):
                connection.send(b"X-%d: %b\r\n" % (number, b"y" * 100))
            connection.send(b"Content-Length: 2\r\n\r\n{}")
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has heard enough
        answer = connection.answer()
        assert answer is None or 400 <= answer.status <= 500
    assert_serves(server)


def test_random_bytes(server: Server) -> None:
    pids = server.pids()
    draw = random.Random(20)
    starts = [b"", b"POST ", b"POST /v2/models/bare/infer HTTP/1.1\r\n", post(PATH, b"", length=50)]
    for number in range(100):
        with RawConnection(server.port) as connection:
            try:
                connection.send(starts[number % 4] + draw.randbytes(draw.randrange(1, 2000)))
            except (BrokenPipeError, ConnectionResetError):
                pass  # it was told enough
    assert server.pids() == pids
    assert_serves(server)
    wait_until(lambda: server.in_flight() == 0)


def test_slow_senders_keep_nobody_waiting(server: Server) -> None:
    waiting = [RawConnection(server.port) for _ in range(50)]
    try:
        for connection in waiting:
            connection.send(post(PATH, b"{", length=1000))
        answered = threading.Event()

        def ask() -> None:
            assert_serves(server)
            answered.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert answered.wait(5)
        asking.join()
    finally:
        for connection in waiting:
            connection.close()
