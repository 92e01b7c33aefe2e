"""The requests of Triton's published shared memory examples, through the stock clients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import serialize_byte_tensor, serialized_byte_size, triton_to_np_dtype

from tests.support.clients.triton_examples import COUNTING, GRPC, GRPC_AIO, HTTP, HTTP_AIO, ONES, as_text, connect
from tests.support.models.triton_examples import write_examples
from tests.support.servers.weir_server import Server

BOTH = pytest.mark.parametrize("protocol", [HTTP, GRPC], ids=["http", "grpc"])
BOTH_AIO = pytest.mark.parametrize("protocol", [HTTP_AIO, GRPC_AIO], ids=["http", "grpc"])

SUM, DIFFERENCE = COUNTING + ONES, COUNTING - ONES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("region_flows")
    (models := folder / "models").mkdir()
    write_examples(models)
    with Server(folder, models, "--allow-client-shm=true") as started:
        yield started


class Regions:
    """Shared memory of this client by name; all of it is gone after the block."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._before = len(shm.mapped_shared_memory_regions())

    def __enter__(self) -> Regions:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles.values():
            shm.destroy_shared_memory_region(handle)
        assert len(shm.mapped_shared_memory_regions()) == self._before

    def create(self, name: str, *arrays: np.ndarray, size: int = 0) -> tuple[str, str, int]:
        """(name, key, byte size), as they are registered, of a region with these arrays one after another."""
        key = f"/weir_flow_{os.getpid()}_{name}"
        size = size or sum(_size(array) for array in arrays)
        self._handles[name] = shm.create_shared_memory_region(name, key, size)
        if arrays:
            shm.set_shared_memory_region(self._handles[name], arrays)
        return name, key, size

    def read(self, name: str, result: Any, output: str, offset: int = 0) -> np.ndarray:
        """The content of a region in the datatype and shape that the response names for this output."""
        described = result.get_output(output)
        assert described is not None
        if isinstance(described, dict):
            datatype, shape = described["datatype"], described["shape"]
        else:
            datatype, shape = described.datatype, list(described.shape)
        return shm.get_contents_as_numpy(self._handles[name], triton_to_np_dtype(datatype), shape, offset=offset)


def _size(array: np.ndarray) -> int:
    return serialized_byte_size(array) if array.dtype.hasobject else array.nbytes


def _placed(made: Any, region: str, size: int, offset: int = 0) -> Any:
    made.set_shared_memory(region, size, offset=offset)
    return made


def _number_requests(protocol: ModuleType, size: int) -> dict[str, Any]:
    """Both inputs in one region and both outputs in another."""
    return {
        "model_name": "simple",
        "inputs": [
            _placed(protocol.InferInput("INPUT0", [1, 16], "INT32"), "input_data", size),
            _placed(protocol.InferInput("INPUT1", [1, 16], "INT32"), "input_data", size, size),
        ],
        "outputs": [
            _placed(protocol.InferRequestedOutput("OUTPUT0"), "output_data", size),
            _placed(protocol.InferRequestedOutput("OUTPUT1"), "output_data", size, size),
        ],
    }


def _names(status: Any) -> set[str]:
    return {region["name"] for region in status} if isinstance(status, list) else set(status.regions)


# simple_http_shm_client, simple_grpc_shm_client, and both for aio


@BOTH
def test_regions(server: Server, protocol: ModuleType) -> None:
    size = COUNTING.nbytes
    with connect(protocol, server) as client, Regions() as regions:
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        client.register_system_shared_memory(*regions.create("output_data", size=2 * size))
        client.register_system_shared_memory(*regions.create("input_data", COUNTING, ONES))
        result = client.infer(**_number_requests(protocol, size))
        np.testing.assert_array_equal(regions.read("output_data", result, "OUTPUT0"), SUM)
        np.testing.assert_array_equal(regions.read("output_data", result, "OUTPUT1", size), DIFFERENCE)
        assert _names(client.get_system_shared_memory_status()) == {"input_data", "output_data"}
        client.unregister_system_shared_memory()
        assert _names(client.get_system_shared_memory_status()) == set()


@BOTH_AIO
async def test_aio_regions(server: Server, protocol: ModuleType) -> None:
    size = COUNTING.nbytes
    async with connect(protocol, server) as client:
        with Regions() as regions:
            await client.unregister_system_shared_memory()
            await client.unregister_cuda_shared_memory()
            await client.register_system_shared_memory(*regions.create("output_data", size=2 * size))
            await client.register_system_shared_memory(*regions.create("input_data", COUNTING, ONES))
            result = await client.infer(**_number_requests(protocol, size))
            np.testing.assert_array_equal(regions.read("output_data", result, "OUTPUT0"), SUM)
            np.testing.assert_array_equal(regions.read("output_data", result, "OUTPUT1", size), DIFFERENCE)
            assert _names(await client.get_system_shared_memory_status()) == {"input_data", "output_data"}
            await client.unregister_system_shared_memory()


# simple_http_shm_string_client, simple_grpc_shm_string_client, and both for aio


def _string_requests(protocol: ModuleType, sizes: dict[str, int]) -> dict[str, Any]:
    """Each tensor in a region of its own that is exactly as large."""
    return {
        "model_name": "simple_string",
        "inputs": [
            _placed(protocol.InferInput(f"INPUT{n}", [1, 16], "BYTES"), f"input{n}_data", sizes[f"input{n}_data"])
            for n in range(2)
        ],
        "outputs": [
            _placed(protocol.InferRequestedOutput(f"OUTPUT{n}"), f"output{n}_data", sizes[f"output{n}_data"])
            for n in range(2)
        ],
    }


def _string_regions(regions: Regions) -> list[tuple[str, str, int]]:
    made = []
    for number, expected in enumerate((SUM, DIFFERENCE)):
        size = serialized_byte_size(serialize_byte_tensor(as_text(expected)))
        made.append(regions.create(f"output{number}_data", size=size))
    for number, array in enumerate((COUNTING, ONES)):
        made.append(regions.create(f"input{number}_data", serialize_byte_tensor(as_text(array))))
    return made


@BOTH
def test_string_regions(server: Server, protocol: ModuleType) -> None:
    with connect(protocol, server) as client, Regions() as regions:
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        registered = _string_regions(regions)
        for region in registered:
            client.register_system_shared_memory(*region)
        result = client.infer(**_string_requests(protocol, {name: size for name, _, size in registered}))
        np.testing.assert_array_equal(regions.read("output0_data", result, "OUTPUT0"), as_text(SUM))
        np.testing.assert_array_equal(regions.read("output1_data", result, "OUTPUT1"), as_text(DIFFERENCE))
        assert len(_names(client.get_system_shared_memory_status())) == 4
        client.unregister_system_shared_memory()


@BOTH_AIO
async def test_aio_string_regions(server: Server, protocol: ModuleType) -> None:
    async with connect(protocol, server) as client:
        with Regions() as regions:
            await client.unregister_system_shared_memory()
            await client.unregister_cuda_shared_memory()
            registered = _string_regions(regions)
            for region in registered:
                await client.register_system_shared_memory(*region)
            result = await client.infer(**_string_requests(protocol, {name: size for name, _, size in registered}))
            np.testing.assert_array_equal(regions.read("output0_data", result, "OUTPUT0"), as_text(SUM))
            np.testing.assert_array_equal(regions.read("output1_data", result, "OUTPUT1"), as_text(DIFFERENCE))
            await client.unregister_system_shared_memory()


# reuse_infer_objects_client


@BOTH
def test_inputs_and_outputs_are_used_again(server: Server, protocol: ModuleType) -> None:
    """The same objects, with their contents in regions, then in the request, then in regions."""
    size = COUNTING.nbytes
    inputs = [protocol.InferInput(f"INPUT{n}", [1, 16], "INT32") for n in range(2)]
    outputs = [protocol.InferRequestedOutput(f"OUTPUT{n}") for n in range(2)]
    with connect(protocol, server) as client, Regions() as regions:
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        for number, array in enumerate((COUNTING, ONES)):
            client.register_system_shared_memory(*regions.create(f"output{number}_data", size=size))
            client.register_system_shared_memory(*regions.create(f"input{number}_data", array))

        def in_regions() -> None:
            for n in range(2):
                _placed(inputs[n], f"input{n}_data", size)
                _placed(outputs[n], f"output{n}_data", size)
            result = client.infer(model_name="simple", inputs=inputs, outputs=outputs)
            np.testing.assert_array_equal(regions.read("output0_data", result, "OUTPUT0"), SUM)
            np.testing.assert_array_equal(regions.read("output1_data", result, "OUTPUT1"), DIFFERENCE)

        in_regions()
        inputs[0].set_data_from_numpy(COUNTING)
        inputs[1].set_data_from_numpy(2 * ONES)
        for output in outputs:
            output.unset_shared_memory()
        result = client.infer(model_name="simple", inputs=inputs, outputs=outputs)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), COUNTING + 2 * ONES)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), COUNTING - 2 * ONES)
        in_regions()
        client.unregister_system_shared_memory()


# simple_http_cudashm_client, simple_grpc_cudashm_client


@pytest.mark.gpu
@BOTH
def test_cuda_regions(server: Server, protocol: ModuleType) -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="the stock client's CUDA module needs cuda-python")
    from tritonclient.utils import cuda_shared_memory as cuda

    size = COUNTING.nbytes
    with connect(protocol, server) as client:
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        handles = {name: cuda.create_shared_memory_region(name, 2 * size, 0) for name in ("input_data", "output_data")}
        try:
            cuda.set_shared_memory_region(handles["input_data"], [COUNTING, ONES])
            for name, handle in handles.items():
                client.register_cuda_shared_memory(name, cuda.get_raw_handle(handle), 0, 2 * size)
            client.infer(**_number_requests(protocol, size))
            for expected, offset in ((SUM, 0), (DIFFERENCE, size)):
                found = cuda.get_contents_as_numpy(handles["output_data"], np.int32, [1, 16], offset=offset)
                np.testing.assert_array_equal(found, expected)
            assert _names(client.get_cuda_shared_memory_status()) == set(handles)
            client.unregister_cuda_shared_memory()
        finally:
            for handle in handles.values():
                cuda.destroy_shared_memory_region(handle)
