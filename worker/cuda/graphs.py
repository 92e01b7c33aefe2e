"""CUDA graphs: a model's run of certain shapes, recorded once and then launched as a whole.

Launching a model kernel by kernel costs more than running it where kernels are small. A graph has its inputs and outputs at
places of its own, so each of an instance's two sets of buffers has graphs of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schemas.datatypes import BY_CONFIG_NAME
from schemas.errors import WeirError, invalid
from schemas.execution_config import CudaOptimization, GraphSpec
from schemas.model_config import ModelConfig
from worker.backend import DeviceLost
from worker.batch_tensors import InputPieces
from worker.cuda.buffers import device_places, size_of
from worker.cuda.runtime import cuda_runtime, succeed
from worker.cuda.stream import InstanceStreams
from worker.device_runner import DeviceRunner

logger = logging.getLogger("weir.worker")

MAX_GRAPHS = 32
"""Graphs of one set of buffers; what has other shapes runs without."""

Shapes = tuple[tuple[str, str, tuple[int, ...]], ...]
"""(name, datatype, shape) of each input, by name."""


class RunGraph:
    """One recorded run: `inputs` and `outputs` are where it reads and writes."""

    def __init__(self, streams: InstanceStreams, runner: DeviceRunner, shapes: Shapes) -> None:
        self._runtime = runtime = cuda_runtime()
        self._executable: Any = None
        compute = self._stream = streams.compute
        self.inputs = device_places(streams.copy_in, shapes)
        streams.copy_in.synchronize()
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        # What the run allocates is the graph's for as long as that lasts.
        with compute.allocating_on(streams.copy_in) as self._memory:
            succeed(runtime.cudaStreamBeginCapture(compute.handle, mode), "beginning to record a graph")
            try:
                outputs = runner.enqueue(self.inputs)
            except BaseException:
                status, graph = runtime.cudaStreamEndCapture(compute.handle)
                if not status and int(graph):
                    runtime.cudaGraphDestroy(graph)
                raise
            graph = succeed(runtime.cudaStreamEndCapture(compute.handle), "recording a graph")
        try:
            if any(isinstance(output, np.ndarray) for output in outputs):
                raise invalid("it has outputs on the host")
            self.outputs = outputs
            self._executable = succeed(runtime.cudaGraphInstantiate(graph, 0), "making a graph")
        finally:
            runtime.cudaGraphDestroy(graph)

    def launch(self) -> None:
        """Has the instance's stream run it."""
        succeed(self._runtime.cudaGraphLaunch(self._executable, self._stream.handle), "launching a graph")

    def __del__(self) -> None:
        if self._executable is not None:
            self._runtime.cudaGraphExecDestroy(self._executable)


class RunGraphs:
    """The graphs of one set of buffers of an instance, whose `runner` can be captured.

    With shapes in the configuration (`graph_spec`) these alone are recorded, by `prepare`; else any that comes twice. What
    is recorded has just been run as it is: engines put off to a run what they have to do once for new shapes, which is no
    part of a graph.
    """

    def __init__(self, model: str, streams: InstanceStreams, runner: DeviceRunner, prepared_only: bool) -> None:
        self._model = model
        self._streams = streams
        self._runner = runner
        self._graphs: dict[Shapes, RunGraph | None] = {}
        self._records = not prepared_only

    def prepare(self, shapes: Shapes) -> None:
        """Runs the model once with zeros, and records that."""
        runtime, streams = cuda_runtime(), self._streams
        zeros = device_places(streams.compute, shapes)
        for tensor in zeros.values():
            size = size_of(tensor.datatype, tensor.shape)
            succeed(runtime.cudaMemsetAsync(tensor.pointer, 0, size, streams.compute.handle), "clearing memory")
        self._runner.enqueue(zeros)
        streams.synchronize()
        self._record(shapes)

    def of(self, pieces: Sequence[InputPieces]) -> RunGraph | None:
        """The graph for these inputs; None where there is none, or none yet."""
        return self._graphs.get(_shapes_in(pieces))

    def has_run(self, pieces: Sequence[InputPieces]) -> None:
        """These inputs, for which there is no graph, were run as they are. Raises DeviceLost."""
        if not self._records:
            return
        shapes = _shapes_in(pieces)
        if shapes in self._graphs:
            self._record(shapes)
        elif len(self._graphs) < MAX_GRAPHS:
            self._graphs[shapes] = None

    def _record(self, shapes: Shapes) -> None:
        try:
            self._graphs[shapes] = RunGraph(self._streams, self._runner, shapes)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a runner can't do while it is recorded, it can do without
            self._streams.synchronize()
            self._records = False
            reason = error.message if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
            logger.warning("model '%s' runs without CUDA graphs: %s", self._model, reason)


def _shapes_in(pieces: Sequence[InputPieces]) -> Shapes:
    return tuple(sorted((piece.name, piece.datatype, piece.shape) for piece in pieces))


def specified_shapes(config: ModelConfig, cuda: CudaOptimization) -> list[Shapes]:
    """The shapes that `graph_spec` asks for. Raises WeirError (INVALID_ARG) for one that leaves something open."""
    return [_shapes_of(config, spec) for spec in cuda.graph_spec]


def _shapes_of(config: ModelConfig, spec: GraphSpec) -> Shapes:
    batching = config.max_batch_size > 0
    if not (1 <= spec.batch_size <= config.max_batch_size if batching else spec.batch_size == 0):
        raise invalid(
            f"model '{config.name}': a graph_spec has batch size {spec.batch_size}, while max_batch_size is "
            f"{config.max_batch_size}"
        )
    rows: Mapping[str, Any] = spec.input
    shapes: list[tuple[str, str, tuple[int, ...]]] = []
    for tensor in config.input:
        dims = rows[tensor.name].dim if tensor.name in rows else tensor.dims
        if any(dim < 0 for dim in dims):
            raise invalid(f"model '{config.name}': a graph_spec leaves the shape of input '{tensor.name}' open")
        shape = (spec.batch_size, *dims) if batching else tuple(dims)
        shapes.append((tensor.name, BY_CONFIG_NAME[tensor.data_type].name, shape))
    return tuple(sorted(shapes))
