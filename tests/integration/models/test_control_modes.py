"""Separate roles: gateways learn models and control modes from the workers' announcements."""

import json
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.zoo import write_identity
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import Start
from tests.support.waiting import wait_until

NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
VALUE = {"IN": np.array([[5]], np.int64)}


@pytest.mark.timeout(120)
def test_only_workers_that_carry_operations_out_are_asked(start: Start, tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "kept", "INT64", "")
    write_identity(tmp_path / "more", "asked_for", "INT64", "")
    more = f"--model-repository={tmp_path / 'more'}"
    start("scheduler")
    served = start.gateway()
    # A gateway that has not heard of any worker does not know what there is.
    assert not served.is_ready()
    for path in ("", "/config", "/stats", "/trace/setting"):
        assert served.get(f"/v2/models/kept{path}")[0] == 503
    with served.http() as client, pytest.raises(InferenceServerException, match="'kept' is not found yet") as error:
        client.infer("kept", http_inputs(VALUE))
    assert error.value.status() == "503"
    with served.grpc() as client, pytest.raises(InferenceServerException, match="'kept' is not found yet") as error:
        client.infer("kept", grpc_inputs(VALUE))
    assert error.value.status() == "StatusCode.UNAVAILABLE"
    _refused(served, "failed to load 'asked_for', there is no worker", "503", "UNAVAILABLE")
    start.worker()
    wait_until(served.is_ready)
    assert [served.get(f"/v2/models/{name}")[0] for name in ("kept", "asked_for")] == [200, 404]
    _refused(served, NOT_ALLOWED, "503", "UNAVAILABLE")
    _refused(served, NOT_ALLOWED, "503", "UNAVAILABLE", "kept")
    assert json.loads(served.get("/v2/models/kept/history")[1])["changes"] == []
    start("worker", more, "--model-control-mode=explicit")
    for open_client in (served.http, served.grpc):
        with open_client() as client:
            client.load_model("asked_for")
            assert client.is_model_ready("asked_for")
            inputs = (http_inputs if open_client == served.http else grpc_inputs)(VALUE)
            assert client.infer("asked_for", inputs).as_numpy("OUT").tolist() == [[5]]
            client.unload_model("asked_for")
            assert not client.is_model_ready("asked_for")
            # What another serves for good is not unloaded, and nobody says so.
            with pytest.raises(InferenceServerException, match="'kept', versions that are still available: 1") as error:
                client.unload_model("kept")
            assert error.value.status() in ("500", "StatusCode.INTERNAL")
            assert client.is_model_ready("kept")
            with pytest.raises(InferenceServerException, match="failed to load 'nowhere'"):
                client.load_model("nowhere")


def _refused(served: Endpoints, text: str, http_status: str, grpc_status: str, model: str = "asked_for") -> None:
    """Loads are refused, at once: a worker that never answers would be waited for half an hour."""
    with served.http() as client, pytest.raises(InferenceServerException, match=text) as error:
        client.load_model(model)
    assert error.value.status() == http_status
    with served.grpc() as client, pytest.raises(InferenceServerException, match=text) as error:
        client.load_model(model)
    assert error.value.status() == f"StatusCode.{grpc_status}"
