"""Triton's stock clients against decoupled models: all responses of a request, and its end."""

import queue
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_aio

from tests.support.gateway.grpc_frontend import BARE_END, END_WITH_LAST, ERROR_AMID, TIMEOUT_S, GrpcFrontend, tensor


def inputs(times: int, ending: int) -> list[Any]:
    return [tensor("IN", np.array([[times, ending]], np.int32), "INT32")]


def ends(response: Any) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)


@pytest.mark.parametrize("ending,answers", [(BARE_END, 4), (END_WITH_LAST, 3)])
def test_a_stock_client_knows_the_end_of_a_request_by_its_final_response(
    frontend: GrpcFrontend, ending: int, answers: int
) -> None:
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()
    frontend.client.start_stream(lambda result, error: told.put((result, error)))
    try:
        frontend.client.async_stream_infer(
            "repeat", inputs(3, ending), request_id="r", enable_empty_final_response=True
        )
        responses = []
        while not responses or not ends(responses[-1]):
            result, error = told.get(timeout=TIMEOUT_S)
            assert error is None
            responses.append(result.get_response())
    finally:
        frontend.client.stop_stream()
    assert told.empty()
    assert [len(response.outputs) for response in responses] == [1] * 3 + [0] * (answers - 3)
    assert {(response.id, response.model_name) for response in responses} == {("r", "repeat")}


async def test_the_aio_client_gets_all_responses_of_several_requests(frontend: GrpcFrontend) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(20):
            ending = ERROR_AMID if number == 7 else BARE_END
            yield {"model_name": "repeat", "inputs": inputs(number, ending), "request_id": str(number)}

    seen: dict[str, list[int]] = {}
    errors = []
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{frontend.port}") as client:
        async for result, error in client.stream_infer(requests(), stream_timeout=TIMEOUT_S):
            if error is not None:
                errors.append(error.message())
                continue
            seen.setdefault(result.get_response().id, []).append(result.as_numpy("OUT").item())
    assert errors == ["told to fail"]
    assert seen.pop("7") == [0, 2, 3, 4, 5, 6]
    assert seen == {str(number): list(range(number)) for number in range(1, 20) if number != 7}
