"""ModelStreamInfer through Triton's stock clients: `start_stream`, `async_stream_infer`, and the aio client."""

import asyncio
import queue
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs
from tests.support.models.zoo import write_slow, write_small_zoo
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("grpc_stream")
    write_small_zoo(folder / "models")
    with Server(folder, folder / "models") as started:
        yield started
        assert started.in_flight() == 0


class Stream:
    """A stock client's stream, with what its callback was told."""

    def __init__(self, client: triton.InferenceServerClient, **options: Any) -> None:
        self.client = client
        self._told: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: self._told.put((result, error)), **options)

    def fast(self, number: int, **more: Any) -> None:
        """Asks a model that answers at once."""
        self.client.async_stream_infer(
            "fast", grpc_inputs({"IN": np.array([[number]])}), request_id=str(number), **more
        )

    def slow(self, number: int, delay_ms: float, **more: Any) -> None:
        """Asks a model that takes its time."""
        inputs = grpc_inputs({"VALUE": np.array([[number]]), "DELAY_MS": np.array([[delay_ms]], np.float32)})
        self.client.async_stream_infer("slow", inputs, request_id=str(number), **more)

    def faulty(self, word: bytes) -> None:
        """Asks a model that fails as it is told."""
        inputs = grpc_inputs({"WHAT": np.array([[word]], np.object_)})
        self.client.async_stream_infer("faulty", inputs, request_id=word.decode())

    def next(self) -> tuple[Any, Any]:
        """(result, error) of the next call of the callback."""
        return self._told.get(timeout=TIMEOUT_S)

    def response(self) -> Any:
        """The next response, which is no error."""
        result, error = self.next()
        assert error is None
        return result.get_response()

    def error(self) -> InferenceServerException:
        """The next error."""
        result, error = self.next()
        assert result is None
        return error

    def has_more(self) -> bool:
        """Whether something was told that has not been looked at."""
        return not self._told.empty()


@contextmanager
def streaming(server: Server, **options: Any) -> Iterator[Stream]:
    with server.grpc() as client:
        yield Stream(client, **options)
        client.stop_stream()


async def come_true(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition)


def is_final(response: Any) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)


def test_answers_come_in_order_from_a_fast_and_a_slow_model(server: Server) -> None:
    with streaming(server) as stream:
        for number in range(1000):
            if number % 20 == 0:
                stream.slow(number, delay_ms=5)
            else:
                stream.fast(number)
        responses = [stream.response() for _ in range(1000)]
        for number, response in enumerate(responses):
            assert response.id == str(number)
            assert response.model_name == ("slow" if number % 20 == 0 else "fast")
            assert np.frombuffer(response.raw_output_contents[0], np.int64).item() == number
            assert is_final(response)
    assert not stream.has_more()


@pytest.mark.parametrize("wants_empty_final", [False, True])
def test_one_answer_is_one_message_and_final(server: Server, wants_empty_final: bool) -> None:
    with streaming(server) as stream:
        stream.fast(7, enable_empty_final_response=wants_empty_final)
        response = stream.response()
        assert (response.id, response.model_version, len(response.outputs)) == ("7", "1", 1)
        assert is_final(response)
    assert not stream.has_more()


def test_errors_do_not_end_the_stream(server: Server) -> None:
    with streaming(server) as stream:
        stream.slow(1, delay_ms=50)
        stream.client.async_stream_infer("unknown", grpc_inputs({"IN": np.array([[1]])}), request_id="u")
        stream.faulty(b"error")
        stream.faulty(b"raise")
        stream.fast(2, model_version="9")
        stream.fast(3)
        assert stream.response().id == "1"
        assert stream.error().message() == "Request for unknown model: 'unknown' is not found"
        error = stream.error()
        assert (error.status(), error.message()) == (None, "as you asked")
        assert "asked to raise" in stream.error().message()
        assert stream.error().message() == "Request for unknown model: 'fast' version 9 is not found"
        assert stream.response().id == "3"


def test_messages_of_errors_name_their_request(server: Server) -> None:
    inputs = [{"name": "WHAT", "datatype": "BYTES", "shape": [1, 1], "contents": {"bytes_contents": [b"error"]}}]
    requests = [
        service_pb2.ModelInferRequest(model_name="faulty", id="late", model_version="1", inputs=inputs),
        service_pb2.ModelInferRequest(model_name="faulty", id="early"),
    ]
    with grpc.insecure_channel(server.grpc_place) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        late, early = stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S)
    assert (late.error_message, late.infer_response.id) == ("as you asked", "late")
    assert (late.infer_response.model_name, late.infer_response.model_version) == ("faulty", "1")
    assert is_final(late.infer_response)
    assert early.error_message.startswith("[request id: early] expected 1 inputs but got 0 inputs")
    assert early.infer_response == service_pb2.ModelInferResponse(id="early")


def test_an_error_ends_the_stream_where_the_client_wants_errors_of_grpc(server: Server) -> None:
    with streaming(server, headers={"triton_grpc_error": "true"}) as stream:
        stream.fast(1)
        assert stream.response().id == "1"
        stream.slow(2, delay_ms=400)
        stream.faulty(b"error")
        error = stream.error()
        assert (error.status(), error.message()) == ("StatusCode.NOT_FOUND", "as you asked")
        with pytest.raises(InferenceServerException, match="no longer in valid state"):
            stream.fast(3)
        wait_until(lambda: server.in_flight() == 0)
    with streaming(server, headers={"triton_grpc_error": "true"}) as again:
        again.fast(4)
        assert again.response().id == "4"


def test_a_refusal_ends_the_stream_where_the_client_wants_errors_of_grpc(server: Server) -> None:
    with streaming(server, headers={"triton_grpc_error": "true"}) as stream:
        stream.fast(1, model_version="9")
        error = stream.error()
        assert error.status() == "StatusCode.NOT_FOUND"
        assert error.message() == "Request for unknown model: 'fast' version 9 is not found"


def test_a_cancelled_stream_leaves_nothing_behind(server: Server) -> None:
    with server.grpc() as client:
        stream = Stream(client)
        for number in range(200):
            stream.slow(number, delay_ms=100)
        wait_until(lambda: server.in_flight() > 0)
        client.stop_stream(cancel_requests=True)
        error = stream.error()
        while stream.has_more():
            error = stream.error()
        assert error.status() == "StatusCode.CANCELLED"
        wait_until(lambda: server.in_flight() == 0)


def test_a_streams_deadline_ends_it(server: Server) -> None:
    with streaming(server, stream_timeout=0.3) as stream:
        stream.slow(1, delay_ms=1000)
        assert stream.error().status() == "StatusCode.DEADLINE_EXCEEDED"
        wait_until(lambda: server.in_flight() == 0)


def test_a_stream_may_be_compressed(server: Server) -> None:
    with streaming(server, compression_algorithm="gzip") as stream:
        array = np.zeros((8, 100_000), np.float32)
        for number in range(4):
            stream.client.async_stream_infer("identity_FP32", grpc_inputs({"IN": array}), request_id=str(number))
        for number in range(4):
            result, error = stream.next()
            assert error is None
            assert result.get_response().id == str(number)
            np.testing.assert_array_equal(result.as_numpy("OUT"), array)


def test_sequences_flags_and_parameters_may_be_given(server: Server) -> None:
    with streaming(server) as stream:
        stream.fast(1, sequence_id=5, sequence_start=True, priority=1, timeout=10_000_000, parameters={"k": "v"})
        assert stream.response().id == "1"


async def test_the_aio_clients_streams(server: Server) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(200):
            model = "unknown" if number == 100 else "fast"
            inputs = grpc_inputs({"IN": np.array([[number]])})
            yield {"model_name": model, "inputs": inputs, "request_id": str(number)}

    async with triton_aio.InferenceServerClient(server.grpc_place) as client:
        seen = [(result, error) async for result, error in client.stream_infer(requests(), stream_timeout=TIMEOUT_S)]
    assert len(seen) == 200
    for number, (result, error) in enumerate(seen):
        if number == 100:
            assert error.message() == "Request for unknown model: 'unknown' is not found"
        else:
            assert (result.get_response().id, result.as_numpy("OUT").item()) == (str(number), number)


async def test_the_aio_client_cancels_a_stream(server: Server) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        inputs = grpc_inputs({"VALUE": np.array([[1]]), "DELAY_MS": np.array([[1000]], np.float32)})
        yield {"model_name": "slow", "inputs": inputs}

    async with triton_aio.InferenceServerClient(server.grpc_place) as client:
        answers = client.stream_infer(requests())
        await come_true(lambda: server.in_flight() > 0)
        assert answers.cancel()
        with pytest.raises(asyncio.CancelledError):
            await anext(aiter(answers))
        await come_true(lambda: server.in_flight() == 0)


def test_a_server_that_stops_answers_its_streams_first(tmp_path: Any) -> None:
    write_slow(tmp_path / "models")
    server = Server(tmp_path, tmp_path / "models")
    try:
        with server.grpc() as client:
            busy = Stream(client)
            busy.slow(1, delay_ms=600)
            wait_until(lambda: server.in_flight() > 0)
            server.process.send_signal(signal.SIGTERM)
            assert busy.response().id == "1"
            error = busy.error()
            assert error.status() == "StatusCode.UNAVAILABLE"
            assert error.message() == "GRPC server is shutting down and has stopped accepting new requests."
            client.stop_stream()
        assert server.process.wait(TIMEOUT_S) == 0
    finally:
        server.close()
