"""The requests of Triton's published examples of health, metadata and model control, through the stock clients."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.triton_examples import GRPC, GRPC_AIO, HTTP, HTTP_AIO, connect
from tests.support.models.triton_examples import write_examples
from tests.support.servers.weir_server import Server

MODEL, WRONG = "simple", "wrong_model_name"
MALFORMED = '"parameters": {"config": {{"max_batch_size": "16"}}}'
BOTH = pytest.mark.parametrize("protocol", [HTTP, GRPC], ids=["http", "grpc"])
BOTH_AIO = pytest.mark.parametrize("protocol", [HTTP_AIO, GRPC_AIO], ids=["http", "grpc"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("control_flows")
    (models := folder / "models").mkdir()
    write_examples(models)
    with Server(folder, models, "--model-control-mode=explicit", f"--load-model={MODEL}") as started:
        yield started


def _extra(protocol: ModuleType) -> dict[str, Any]:
    """What the examples add to a request: to no effect."""
    if protocol in (HTTP, HTTP_AIO):
        return {"query_params": {"test_1": 1, "test_2": 2}}
    return {"headers": {"test": "1", "dummy": "2"}}


def _name(document: Any) -> str:
    """The name in a document of either protocol; a gRPC model configuration is wrapped in its response."""
    if isinstance(document, dict):
        return str(document["name"])
    return str(document.config.name if hasattr(document, "config") else document.name)


def _max_batch_size(config: Any) -> int:
    return int(config["max_batch_size"] if isinstance(config, dict) else config.config.max_batch_size)


def _count(index: Any) -> int:
    return len(index if isinstance(index, list) else index.models)


# simple_http_health_metadata, simple_grpc_health_metadata, and both for aio


@BOTH
def test_health_and_metadata(server: Server, protocol: ModuleType) -> None:
    extra = _extra(protocol)
    with connect(protocol, server) as client:
        client.load_model(MODEL)
        assert client.is_server_live(**extra)
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
        assert _name(client.get_server_metadata()) == "triton"
        assert _name(client.get_model_metadata(MODEL, **extra)) == MODEL
        with pytest.raises(InferenceServerException) as caught:
            client.get_model_metadata(WRONG)
        assert "Request for unknown model" in caught.value.message()
        assert _name(client.get_model_config(MODEL)) == MODEL


@BOTH_AIO
async def test_aio_health_and_metadata(server: Server, protocol: ModuleType) -> None:
    extra = _extra(protocol)
    async with connect(protocol, server) as client:
        await client.load_model(MODEL)
        assert await client.is_server_live(**extra)
        assert await client.is_server_ready()
        assert await client.is_model_ready(MODEL)
        assert _name(await client.get_server_metadata()) == "triton"
        assert _name(await client.get_model_metadata(MODEL, **extra)) == MODEL
        with pytest.raises(InferenceServerException) as caught:
            await client.get_model_metadata(WRONG)
        assert "Request for unknown model" in caught.value.message()
        assert _name(await client.get_model_config(MODEL)) == MODEL


# simple_http_model_control, simple_grpc_model_control, and both for aio


@BOTH
def test_model_control(server: Server, protocol: ModuleType) -> None:
    with connect(protocol, server) as client:
        assert _count(client.get_model_repository_index()) == len(list((server.folder / "models").iterdir()))
        client.load_model(MODEL)
        assert client.is_model_ready(MODEL)

        with pytest.raises(InferenceServerException) as caught:
            client.load_model(MODEL, config=MALFORMED)
        assert "failed to load" in caught.value.message()
        client.load_model(MODEL, config='{"max_batch_size":"16"}')
        assert _max_batch_size(client.get_model_config(MODEL)) == 16

        client.unload_model(MODEL)
        assert not client.is_model_ready(MODEL)
        with pytest.raises(InferenceServerException) as caught:
            client.load_model(WRONG)
        assert "failed to load" in caught.value.message()


@BOTH_AIO
async def test_aio_model_control(server: Server, protocol: ModuleType) -> None:
    async with connect(protocol, server) as client:
        index = await client.get_model_repository_index()
        assert _count(index) == len(list((server.folder / "models").iterdir()))
        await client.load_model(MODEL)
        assert await client.is_model_ready(MODEL)
        await client.unload_model(MODEL)
        assert not await client.is_model_ready(MODEL)
        with pytest.raises(InferenceServerException) as caught:
            await client.load_model(WRONG)
        assert "failed to load" in caught.value.message()


@BOTH
def test_a_file_of_too_long_a_name(server: Server, protocol: ModuleType) -> None:
    """Refused, and the server lives on: Triton 2.51 dies of it, so newer examples ask for this."""
    with connect(protocol, server) as client:
        with pytest.raises(InferenceServerException, match=f"failed to load '{MODEL}'"):
            client.load_model(MODEL, config="{}", files={"file:" + "A" * 256: b"a"})
        assert client.is_server_live()
