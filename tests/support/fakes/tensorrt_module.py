"""A fake of the module `tensorrt`, as far as Weir uses it, with host memory in place of a GPU's.

It models the mistakes that the real one does not detect: failures are return values, an engine runs on addresses (a
wrong one is read as it is), shapes are checked against the active profile, a context must not be used by two threads,
and outputs whose size depends on the inputs are allocated while it runs. A plan is JSON: tensors, profiles, and one of
a few operations.
"""

from __future__ import annotations

import ctypes
import enum
import json
import threading
from types import SimpleNamespace

import numpy as np

DataType = enum.Enum("DataType", "FLOAT HALF INT32 INT64 BOOL UINT8 INT8 BF16 FP8")
TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
TensorLocation = enum.Enum("TensorLocation", "DEVICE HOST")
ExecutionContextAllocationStrategy = enum.Enum(
    "ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED"
)
_NUMPY = {"FLOAT": np.float32, "INT32": np.int32, "INT64": np.int64, "HALF": np.float16}


registrations = []
"""(logger, namespace) of each registration of plugins."""


def init_libnvinfer_plugins(logger, namespace):
    registrations.append((logger, namespace))
    return True


class ILogger:
    def __init__(self):
        pass


class IOutputAllocator:
    def __init__(self):
        pass


class Runtime:
    def __init__(self, logger):
        self.logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, plan):
        try:
            if json.loads(plan).get("has_plugins") and not registrations:
                self.logger.log(SimpleNamespace(name="ERROR"), "no creator of the plugin is registered")
                return None
            return Engine(json.loads(plan), self.engine_host_code_allowed)
        except ValueError:
            self.logger.log(SimpleNamespace(name="ERROR"), "the plan has no magic number")
            return None


class Engine:
    def __init__(self, plan, host_code):
        self.plan = plan
        self.host_code = host_code
        self.num_io_tensors = len(plan["tensors"])
        self.num_optimization_profiles = len(plan["profiles"])
        self._by_name = {tensor["name"]: tensor for tensor in plan["tensors"]}

    def get_tensor_name(self, index):
        return self.plan["tensors"][index]["name"]

    def get_tensor_dtype(self, name):
        return DataType[self._by_name[name]["dtype"]]

    def get_tensor_mode(self, name):
        return TensorIOMode[self._by_name[name]["mode"]]

    def get_tensor_shape(self, name):
        return tuple(self._by_name[name]["shape"])

    def get_tensor_location(self, name):
        return TensorLocation[self._by_name[name].get("location", "DEVICE")]

    def get_tensor_format_desc(self, name, profile):
        assert profile < self.num_optimization_profiles
        return self._by_name[name].get("format", "Row major linear FP32 format (kLINEAR)")

    def get_tensor_profile_shape(self, name, index):
        return [tuple(shape) for shape in self.plan["profiles"][index][name]]

    def create_execution_context(self, strategy):
        return None if self.plan.get("no_memory") else Context(self, strategy)


contexts = []
"""The contexts that were created since a test has cleared the list."""


class Context:
    def __init__(self, engine, strategy):
        contexts.append(self)
        self.engine = engine
        self.strategy = strategy
        self.profile = None
        self.profiles_set = []
        self.shapes = {}
        self.addresses = {}
        self.allocators = {}
        self._thread = None

    def _check_thread(self):
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), "a context was used by two threads"

    def set_optimization_profile_async(self, index, stream):
        self._check_thread()
        assert stream
        self.profile = index
        self.profiles_set.append(index)
        self.shapes.clear()
        return True

    def set_input_shape(self, name, shape):
        assert self.profile is not None
        if name not in self.engine._by_name:
            return False
        allowed = self.engine.plan["profiles"][self.profile].get(name)
        if allowed and not all(
            low <= size <= high for low, size, high in zip(allowed[0], shape, allowed[2], strict=True)
        ):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return bool(address)

    def set_output_allocator(self, name, allocator):
        self.allocators[name] = allocator
        return True

    def infer_shapes(self):
        names = [t["name"] for t in self.engine.plan["tensors"] if t["mode"] == "INPUT"]
        return [name for name in names if name not in self.shapes or name not in self.addresses]

    def get_tensor_shape(self, name):
        if name in self.shapes:
            return self.shapes[name]
        operation = self.engine.plan["operation"]
        if operation == "double":
            return self.shapes["IN"]
        if operation == "fill":
            return tuple(int(n) for n in self._read("SHAPE"))
        return (-1,)

    def _read(self, name):
        return _view(self.addresses[name], self.shapes[name], _NUMPY[self.engine._by_name[name]["dtype"]]).copy()

    def execute_async_v3(self, stream):
        self._check_thread()
        assert stream
        if self.engine.plan.get("fails"):
            return False
        operation = self.engine.plan["operation"]
        if operation == "double":
            result = self._read("IN") * 2
        elif operation == "fill":
            result = np.full([int(n) for n in self._read("SHAPE")], 7, np.float32)
        else:
            values = self._read("IN")
            result = values[values != 0]
        if "OUT" in self.allocators:
            allocator = self.allocators["OUT"]
            self.addresses["OUT"] = allocator.reallocate_output_async("OUT", 0, result.nbytes, 256, stream)
            allocator.notify_shape("OUT", result.shape)
        _view(self.addresses["OUT"], result.shape, result.dtype)[...] = result
        return True


class Memory:
    """Memory of the fake GPU, filled with a pattern that shows what was not written."""

    def __init__(self, size_bytes):
        self.size_bytes = size_bytes
        self._buffer = (ctypes.c_ubyte * size_bytes)(*([0xAB] * size_bytes))
        self.pointer = ctypes.addressof(self._buffer)


class Stream:
    """A `weir.worker.backend_api.interface.InstanceStream`."""

    device_id = 0
    handle = 1234

    def allocate(self, size_bytes):
        return Memory(size_bytes)


def _view(address, shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype).reshape(shape)


def plan(operation="double", dtype="FLOAT", profiles=None, **more):
    """A plan: IN [-1, 4] -> OUT, or SHAPE [2] -> OUT (operation "fill"), or IN [-1] -> OUT [-1] ("nonzero")."""
    inputs = {
        "double": [{"name": "IN", "mode": "INPUT", "dtype": dtype, "shape": [-1, 4]}],
        "nonzero": [{"name": "IN", "mode": "INPUT", "dtype": dtype, "shape": [-1]}],
        "fill": [{"name": "SHAPE", "mode": "INPUT", "dtype": "INT64", "shape": [2], "location": "HOST"}],
    }[operation]
    output = {"name": "OUT", "mode": "OUTPUT", "dtype": dtype, "shape": [-1, 4] if operation != "nonzero" else [-1]}
    default = {"double": [{"IN": [[1, 4], [4, 4], [8, 4]]}], "nonzero": [{"IN": [[1], [4], [64]]}], "fill": [{}]}
    fields = {"operation": operation, "tensors": [*inputs, output], "profiles": profiles or default[operation], **more}
    return json.dumps(fields).encode()
