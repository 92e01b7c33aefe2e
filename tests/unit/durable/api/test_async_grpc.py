"""Requests that are answered later, over gRPC with a stock client."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.support.gateway.async_frontend import Door, run
from weir.durable.api.acceptance import DEPTH_MAX_AGE_S
from weir.gateway.access import Access


async def infer(door: Door, values: np.ndarray, headers: dict[str, str], **more: Any) -> Any:
    def ask() -> Any:
        tensor = triton.InferInput("IN", list(values.shape), "FP32")
        tensor.set_data_from_numpy(values)
        with triton.InferenceServerClient(f"127.0.0.1:{door.grpc_port}") as client:
            return client.infer("m", [tensor], headers=headers, **more).get_response()

    return await asyncio.to_thread(ask)


def test_a_call_is_answered_once_its_request_is_on_disk(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        values = np.arange(6, dtype=np.float32)
        headers = {"prefer": "respond-async", "weir-tenant": "acme", "idempotency-key": "k"}
        outputs = [triton.InferRequestedOutput("OUT")]
        answer = await infer(door, values, headers, request_id="mine", priority=2, sequence_id=7, outputs=outputs)
        assert (answer.id, answer.model_name, len(answer.outputs)) == ("mine", "m", 0)
        assert answer.parameters["job_status"].string_param == "queued"
        id = answer.parameters["job_id"].string_param
        assert (await door.done(id))["status"] == "succeeded"
        [seen] = door.intake.seen
        assert (seen["weir-tenant"], seen["nats-msg-id"]) == ("acme", id)
        result = await door.ask("GET", f"/v2/jobs/{id}/result")
        length = int(result.headers["inference-header-content-length"])
        assert np.array_equal(np.frombuffer(result.body[length:], np.float32), values)
        again = await infer(door, values, headers, request_id="mine", priority=2, sequence_id=7, outputs=outputs)
        assert again.parameters["job_status"].string_param == "succeeded"
        with pytest.raises(InferenceServerException, match="Idempotency-Key") as refused:
            await infer(door, values + 1, headers)
        assert refused.value.status() == str(grpc.StatusCode.ALREADY_EXISTS)

    run(nats_url, scenario)


def test_bad_calls_are_refused_and_nothing_is_stored(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        values = np.zeros(1, np.float32)
        headers = {"weir-prefer": "respond-async"}
        for more, text in (
            ({"weir-deadline-ms": "x"}, "Weir-Deadline-Ms"),
            ({"weir-callback-url": "http://127.0.0.1/"}, "not allowed"),
        ):
            with pytest.raises(InferenceServerException, match=text):
                await infer(door, values, {**headers, **more})
        with pytest.raises(InferenceServerException, match="shape"):
            await infer(door, np.zeros((2, 2), np.float32), headers)
        with pytest.raises(InferenceServerException, match="not found"):
            await infer(door, values, headers, model_version="9")
        assert await door.queued() == 0

    run(nats_url, scenario)


def test_a_full_queue_and_forwarded_headers(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.takes.clear()
        values = np.zeros(1, np.float32)
        headers = {"prefer": "respond-async", "x-team": "blue"}
        await infer(door, values, headers)
        await infer(door, values, headers)
        await asyncio.sleep(DEPTH_MAX_AGE_S)
        with pytest.raises(InferenceServerException, match="queue of model 'm' is full") as refused:
            await infer(door, values, headers)
        assert refused.value.status() == str(grpc.StatusCode.RESOURCE_EXHAUSTED)
        stored = await door.client.jetstream().get_msg("QUEUE", seq=None, subject="event.m.>", direct=False)
        assert b'"x-team":"blue"' in stored.data

    run(nats_url, scenario, Access(grpc_forward_pattern="x-.*"), queue_max_messages=2)
