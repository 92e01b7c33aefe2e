"""A fake of ONNX Runtime on a GPU, with the names and arguments that `weir.worker.backends.onnxruntime.gpu_runner` uses.

The GPU is a `FakeGpu`: its memory exists only for addresses within an allocation, and its streams do nothing before
they are waited for. Mistakes that rarely show on a real GPU therefore fail at once:

- an address that is wrong or freed causes "CUDA failure 700", and every later run fails too
- an output that is read before its stream was waited for is full of 0xAA bytes
- a session that can't have its provider is silently opened on the CPU (`falls_back`)
- a binding that is run again writes into the outputs of its previous run
- outputs on the host of a run that does not wait for the device are full of 0xAA bytes

`test_backend_conformance.py` compares the names and arguments with the real package. The network that runs is that of
`FakeNetwork`, whatever the model's file contains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

GARBAGE = 0xAA

ELEMENTS = {
    1: ("tensor(float)", np.float32),
    6: ("tensor(int32)", np.int32),
    7: ("tensor(int64)", np.int64),
    16: ("tensor(bfloat16)", np.uint16),
}
NUMBERS = {name: number for number, (name, _) in ELEMENTS.items()}


class FakeGpu:
    """Memory and streams. `lost` is the error of every operation after an illegal access."""

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray] = {}
        self.streams: dict[int, FakeStream] = {}
        self.lost = ""
        self.limit_bytes = 1 << 30
        self._next = 0x7000_0000_0000

    def allocate(self, size: int) -> int:
        if sum(map(len, self.blocks.values())) + size > self.limit_bytes:
            raise Exception(f"[ONNXRuntimeError] : 6 : Failed to allocate memory for requested buffer of size {size}")
        pointer, self._next = self._next, self._next + size + 4096
        self.blocks[pointer] = np.full(max(1, size), GARBAGE, np.uint8)
        return pointer

    def at(self, pointer: int, size: int) -> np.ndarray:
        if not self.lost:
            for base, block in self.blocks.items():
                if base <= pointer and pointer + size <= base + len(block):
                    return block[pointer - base : pointer - base + size]
            self.lost = (
                "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=secret ; file=/src/x.cc"
            )
        raise Exception(self.lost)

    def stream(self, handle: int) -> FakeStream:
        return self.streams[handle]


@dataclass
class FakeMemory:
    """A `weir.worker.backend_api.interface.DeviceMemory`, freed in the order of its stream."""

    stream: FakeStream
    size_bytes: int
    pointer: int = 0

    def __post_init__(self) -> None:
        self.pointer = self.stream.gpu.allocate(self.size_bytes)

    def __del__(self) -> None:
        pointer, gpu = self.pointer, self.stream.gpu
        self.stream.work.append(lambda: gpu.blocks.pop(pointer, None))


class FakeStream:
    """A `weir.worker.backend_api.interface.InstanceStream`, whose work is done when it is waited for."""

    def __init__(self, gpu: FakeGpu, handle: int = 0x51, device_id: int = 0) -> None:
        self.gpu = gpu
        self.handle = handle
        self.device_id = device_id
        self.work: list[Callable[[], Any]] = []
        gpu.streams[handle] = self

    def allocate(self, size_bytes: int) -> FakeMemory:
        return FakeMemory(self, size_bytes)

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()

    def put(self, array: np.ndarray) -> FakeMemory:
        """A copy of `array` in device memory, valid once the stream has reached it."""
        memory = self.allocate(array.nbytes)
        content = np.frombuffer(array.tobytes(), np.uint8)
        pointer, gpu = memory.pointer, self.gpu

        def write() -> None:
            gpu.at(pointer, len(content))[:] = content

        self.work.append(write)
        return memory

    def get(self, pointer: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """The present content, without waiting for a stream."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return self.gpu.at(pointer, size).copy().view(dtype).reshape(shape)


@dataclass
class FakeTensorInfo:
    name: str
    type: str
    shape: list[Any]
    place: str = "Cuda"


@dataclass
class FakeNetwork:
    """What the session computes: by default `OUT = -IN`, both FP32."""

    inputs: list[FakeTensorInfo] = field(default_factory=lambda: [FakeTensorInfo("IN", "tensor(float)", ["b", 3])])
    outputs: list[FakeTensorInfo] = field(default_factory=lambda: [FakeTensorInfo("OUT", "tensor(float)", ["b", 3])])
    compute: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda feeds: {"OUT": -feeds["IN"]}


class FakeOrtValue:
    """`OrtValue`: its own memory on the GPU or on the host."""

    def __init__(self, ort: FakeOnnxRuntime, shape: Sequence[int], element: int, device: str, stream: Any = None):
        self._shape, self._element, self._device, self._ort = list(shape), element, device, ort
        self._dtype = np.dtype(ELEMENTS[element][1])
        self._stream = stream
        size = math.prod(shape) * self._dtype.itemsize
        self.array = np.full(size, GARBAGE, np.uint8) if device == "cpu" else None
        self._pointer = ort.gpu.allocate(size) if device == "cuda" else 0

    def __del__(self) -> None:
        if self._pointer:
            pointer, gpu = self._pointer, self._ort.gpu
            if self._stream is None:
                gpu.blocks.pop(pointer, None)
            else:
                self._stream.work.append(lambda: gpu.blocks.pop(pointer, None))

    def data_ptr(self) -> int:
        return self._pointer if self._device == "cuda" else self.array.ctypes.data

    def shape(self) -> list[int]:
        return self._shape

    def data_type(self) -> str:
        return ELEMENTS[self._element][0]

    def numpy(self) -> np.ndarray:
        assert self._device == "cpu", "the fake copies nothing back"
        if self._element == 16:
            raise RuntimeError("No corresponding Numpy type for Tensor Type.")
        return self.array.view(self._dtype).reshape(self._shape)

    def write(self, array: np.ndarray) -> None:
        content = np.frombuffer(np.ascontiguousarray(array, self._dtype).tobytes(), np.uint8)
        target = self.array if self._device == "cpu" else self._ort.gpu.at(self._pointer, len(content))
        target[:] = content


class FakeBinding:
    def __init__(self, session: FakeSession) -> None:
        self.session = session
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: int, shape: Any, buffer_ptr: int
    ) -> None:
        assert device_type in ("cpu", "cuda")
        assert isinstance(element_type, int)
        (declared,) = [info for info in self.session.network.inputs if info.name == name]
        if ELEMENTS[element_type][0] != declared.type:
            raise Exception(f"[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Unexpected input data type for '{name}'")
        self.inputs[name] = (device_type, device_id, element_type, tuple(shape), buffer_ptr)

    def bind_output(self, name: str, device_type: str = "cpu", device_id: int = 0) -> None:
        self.outputs[name] = (device_type, device_id)

    def get_outputs(self) -> list[FakeOrtValue]:
        return list(self.outputs.values())


class FakeSession:
    """`InferenceSession`; `FakeOnnxRuntime.sessions` has each of them."""

    def __init__(
        self, ort: FakeOnnxRuntime, path: str, options: Any, providers: list[Any], enable_fallback: int
    ) -> None:
        assert enable_fallback == 0, "with the fallback it prints to stdout and takes the CPU"
        self.ort, self.path, self.options, self.asked = ort, path, options, providers
        names = [name for name, _ in providers]
        self.cuda = dict(providers).get("CUDAExecutionProvider")
        if ort.cpu_lacks_operations and self.cuda is None:
            raise Exception("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Fused(1)")
        if ort.falls_back:
            names, self.cuda = ["CPUExecutionProvider"], None
        self._providers = names
        self.network = ort.network
        self.run_entries: dict[str, str] = {}
        ort.sessions.append(self)

    def get_providers(self) -> list[str]:
        return self._providers

    def get_inputs(self) -> list[FakeTensorInfo]:
        return self.network.inputs

    def get_outputs(self) -> list[FakeTensorInfo]:
        return self.network.outputs

    def get_overridable_initializers(self) -> list[FakeTensorInfo]:
        return []

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name=info.place) for info in self.network.inputs]

    def get_output_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name=info.place) for info in self.network.outputs]

    def io_binding(self) -> FakeBinding:
        return FakeBinding(self)

    def run(self, outputs: list[str], feeds: dict[str, np.ndarray], run_options: Any = None) -> list[np.ndarray]:
        results = self.network.compute(dict(feeds))
        return [results[name] for name in outputs]

    def run_with_iobinding(self, binding: FakeBinding, run_options: Any = None) -> None:
        self.run_entries = dict(run_options.entries) if run_options is not None else {}
        if self.ort.gpu.lost:
            raise Exception(self.ort.gpu.lost)
        assert binding.session is self
        assert self.cuda is not None
        entries = run_options.entries if run_options is not None else {}
        stream = self.ort.gpu.stream(int(self.cuda["user_compute_stream"]))
        assert "enable_cuda_graph" not in self.cuda, "a capture would break allocations of other threads"
        inputs, outputs = dict(binding.inputs), self._outputs(binding, stream)
        waits = entries.get("disable_synchronize_execution_providers") != "1"
        stream.work.append(lambda: self._compute(inputs, outputs, waits))
        if waits:
            stream.synchronize()

    def _outputs(self, binding: FakeBinding, stream: FakeStream) -> dict[str, FakeOrtValue]:
        shapes = {name: given[3] for name, given in binding.inputs.items()}
        for info in self.network.outputs:
            if isinstance(binding.outputs.get(info.name), tuple):
                device, _ = binding.outputs[info.name]
                shape = self.ort.output_shape(shapes)
                value = FakeOrtValue(self.ort, shape, NUMBERS[info.type], device, stream if device == "cuda" else None)
                binding.outputs[info.name] = value
        return binding.outputs

    def _compute(self, inputs: dict[str, Any], outputs: dict[str, FakeOrtValue], waits: bool) -> None:
        feeds: dict[str, np.ndarray] = {}
        for name, (device, _, element, shape, pointer) in inputs.items():
            dtype = np.dtype(ELEMENTS[element][1])
            size = math.prod(shape) * dtype.itemsize
            content = self.ort.gpu.at(pointer, size) if device == "cuda" else self.ort.host_at(pointer, size)
            feeds[name] = content.copy().view(dtype).reshape(shape)
        for name, array in self.network.compute(feeds).items():
            if name in outputs and (waits or outputs[name]._device == "cuda"):
                outputs[name].write(array)


class FakeSessionOptions:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


class FakeRunOptions:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_run_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


class FakeOnnxRuntime:
    """Stands in for the module `onnxruntime`."""

    def __init__(self, gpu: FakeGpu | None = None) -> None:
        self.gpu = gpu or FakeGpu()
        self.network = FakeNetwork()
        self.falls_back = False
        self.cpu_lacks_operations = False
        self.sessions: list[FakeSession] = []
        self.preloads = 0
        self.output_shape: Callable[[dict[str, Any]], Sequence[int]] = lambda shapes: shapes["IN"]
        self.SessionOptions = FakeSessionOptions
        self.RunOptions = FakeRunOptions
        self.GraphOptimizationLevel = SimpleNamespace(
            ORT_ENABLE_ALL="all", ORT_ENABLE_BASIC="basic", ORT_ENABLE_EXTENDED="extended", ORT_DISABLE_ALL="none"
        )
        self.ExecutionMode = SimpleNamespace(ORT_PARALLEL="parallel")

    def get_available_providers(self) -> list[str]:
        return ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]

    def get_all_providers(self) -> list[str]:
        return [*self.get_available_providers(), "OpenVINOExecutionProvider"]

    def preload_dlls(self) -> None:
        self.preloads += 1

    def InferenceSession(
        self, path: str, sess_options: Any, providers: list[Any], enable_fallback: int = 1
    ) -> FakeSession:
        return FakeSession(self, path, sess_options, providers, enable_fallback)

    def host_at(self, pointer: int, size: int) -> np.ndarray:
        import ctypes

        return np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), np.uint8)
