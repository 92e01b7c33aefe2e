"""CUDA graphs: a model's run with certain shapes, captured once and then launched as a whole.

For small kernels, launching them one by one costs more than running them. A graph has fixed input and output memory, so
each of an instance's two sets of buffers has its own graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weir.schemas.config.model_config import CudaOptimization, GraphSpec, ModelConfig
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.tensors import BY_CONFIG_NAME
from weir.worker.backend_api.interface import DeviceLost, DeviceRunner, DeviceTensor
from weir.worker.cuda.buffers import allocate_tensors, size_of
from weir.worker.cuda.runtime import check_cuda, cuda_runtime, free_on, handle_of
from weir.worker.cuda.stream import CudaStream, InstanceStreams
from weir.worker.execution.batch_tensors import InputPieces
from weir.worker.execution.sequences import control_datatypes

logger = logging.getLogger("weir.worker")

MAX_GRAPHS = 32
"""Graphs of one set of buffers; batches of further shapes run without a graph."""

MAX_GRAPHS_WITH_RUNNERS = 4
"""The same where each graph has a runner of its own, with the memory that the model needs for its largest batch."""

Shapes = tuple[tuple[str, str, tuple[int, ...]], ...]
"""(name, datatype, shape) of each input, by name."""


class RunGraph:
    """One captured run, with the device memory of its `inputs` and `outputs`.

    Where `runner` has a runner for graphs (`DeviceRunner.for_graph`), the graph keeps one, which has run once before.
    """

    def __init__(self, streams: InstanceStreams, runner: DeviceRunner, shapes: Shapes) -> None:
        self._runtime = runtime = cuda_runtime()
        self._executable: Any = None
        self._own_runner: DeviceRunner | None = None
        compute = self._stream = streams.compute
        self.inputs = allocate_tensors(streams.copy_in, shapes)
        clear(streams.copy_in, self.inputs)
        streams.copy_in.synchronize()
        self._own_runner = runner.for_graph() if hasattr(runner, "for_graph") else None
        if self._own_runner is not None:
            runner = self._own_runner
            runner.enqueue(self.inputs)
            compute.synchronize()
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        # Memory that the run allocates belongs to the graph.
        with compute.allocating_on(streams.copy_in) as self._memory:
            check_cuda(runtime.cudaStreamBeginCapture(compute.handle, mode), "starting to capture a graph")
            try:
                outputs = runner.enqueue(self.inputs)
            except BaseException:
                status, graph = runtime.cudaStreamEndCapture(compute.handle)
                if not status and handle_of(graph):
                    runtime.cudaGraphDestroy(graph)
                raise
            graph = check_cuda(runtime.cudaStreamEndCapture(compute.handle), "capturing a graph")
        try:
            if any(isinstance(output, np.ndarray) for output in outputs):
                raise invalid("the model has outputs on the host")
            self.outputs = outputs
            self._executable = check_cuda(runtime.cudaGraphInstantiate(graph, 0), "instantiating a graph")
        finally:
            runtime.cudaGraphDestroy(graph)

    def launch(self) -> None:
        """Enqueues the run on the instance's stream."""
        check_cuda(self._runtime.cudaGraphLaunch(self._executable, self._stream.handle), "launching a graph")

    def __del__(self) -> None:
        if self._executable is not None:
            free_on(self._stream.device_id, self._runtime.cudaGraphExecDestroy, self._executable)
        if self._own_runner is not None:
            self._own_runner.close()


def clear(stream: CudaStream, tensors: Mapping[str, DeviceTensor]) -> None:
    """Enqueues the filling of these tensors with zeros."""
    runtime = cuda_runtime()
    for tensor in tensors.values():
        size = size_of(tensor.datatype, tensor.shape)
        check_cuda(runtime.cudaMemsetAsync(tensor.pointer, 0, size, stream.handle), "clearing memory")


class RunGraphs:
    """The graphs of one set of buffers of an instance, whose `runner` can be captured.

    If the configuration has shapes (`graph_spec`), only these are captured, by `prepare`; otherwise all shapes that occur
    twice. Shapes are captured right after a run without a graph, because some engines prepare for new shapes in their first
    run, which must not be part of a graph.
    """

    def __init__(self, model: str, streams: InstanceStreams, runner: DeviceRunner, prepared_only: bool) -> None:
        self._model = model
        self._streams = streams
        self._runner = runner
        self._graphs: dict[Shapes, RunGraph | None] = {}
        self._captures = not prepared_only
        self._max_graphs = MAX_GRAPHS_WITH_RUNNERS if hasattr(runner, "for_graph") else MAX_GRAPHS

    def prepare(self, shapes: Shapes) -> None:
        """Runs the model once with zeros, then captures a graph for these shapes."""
        streams = self._streams
        zeros = allocate_tensors(streams.compute, shapes)
        clear(streams.compute, zeros)
        self._runner.enqueue(zeros)
        streams.synchronize()
        self._capture(shapes)

    def of(self, pieces: Sequence[InputPieces]) -> RunGraph | None:
        """The graph for these inputs; None if there is none (yet)."""
        return self._graphs.get(_shapes_in(pieces))

    def has_run(self, pieces: Sequence[InputPieces]) -> None:
        """Records that these inputs were run without a graph, and captures one if it is due. Raises DeviceLost."""
        if not self._captures:
            return
        shapes = _shapes_in(pieces)
        if shapes in self._graphs:
            self._capture(shapes)
        elif len(self._graphs) < self._max_graphs:
            self._graphs[shapes] = None

    def _capture(self, shapes: Shapes) -> None:
        try:
            self._graphs[shapes] = RunGraph(self._streams, self._runner, shapes)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - a run that can't be captured runs without a graph
            self._streams.synchronize()
            self._captures = False
            reason = error.message if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
            logger.warning("model '%s' runs without CUDA graphs: %s", self._model, reason)


def _shapes_in(pieces: Sequence[InputPieces]) -> Shapes:
    return tuple(sorted((piece.name, piece.datatype, piece.shape) for piece in pieces))


def specified_shapes(config: ModelConfig, cuda: CudaOptimization) -> list[Shapes]:
    """The shapes of all inputs of the model, by `graph_spec`. Raises WeirError (INVALID_ARG) for an incomplete one."""
    return [_shapes_of(config, spec) for spec in cuda.graph_spec]


def _shapes_of(config: ModelConfig, spec: GraphSpec) -> Shapes:
    batching = config.max_batch_size > 0
    if not (1 <= spec.batch_size <= config.max_batch_size if batching else spec.batch_size == 0):
        raise invalid(
            f"model '{config.name}': a graph_spec has batch size {spec.batch_size}, while max_batch_size is "
            f"{config.max_batch_size}"
        )
    given: Mapping[str, Any] = spec.input
    rows = (spec.batch_size,) if batching else ()
    shapes: list[tuple[str, str, tuple[int, ...]]] = []
    for tensor in _model_inputs(config):
        dims = given[tensor.name].dim if tensor.name in given else tensor.dims
        if any(dim < 0 for dim in dims):
            raise invalid(f"model '{config.name}': a graph_spec has no complete shape for input '{tensor.name}'")
        shapes.append((tensor.name, tensor.datatype, (*(rows if tensor.has_rows else ()), *dims)))
    return tuple(sorted(shapes))


class _ModelInput(NamedTuple):
    """A tensor that the model gets; `dims` are without the batch dimension, which it has if it `has_rows`."""

    name: str
    datatype: str
    dims: Sequence[int]
    has_rows: bool = True


def _model_inputs(config: ModelConfig) -> Iterator[_ModelInput]:
    """All inputs of the model: those of requests, as it sees them, batch inputs, controls and states."""
    for tensor in config.input:
        datatype = BY_CONFIG_NAME[tensor.data_type].name
        if tensor.allow_ragged_batch:
            # The elements of all requests in one dimension, however many there are.
            yield _ModelInput(tensor.name, datatype, [-1], has_rows=False)
        else:
            yield _ModelInput(tensor.name, datatype, tensor.dims if tensor.reshape is None else tensor.reshape.shape)
    for batch_input in config.batch_input:
        # Their shapes depend on the number of requests.
        for name in batch_input.target_name:
            yield _ModelInput(name, BY_CONFIG_NAME[batch_input.data_type].name, [-1], has_rows=False)
    for name, datatype in control_datatypes(config).items():
        yield _ModelInput(name, datatype, [1])
    for state in config.sequence_batching.state if config.sequence_batching is not None else ():
        yield _ModelInput(state.input_name, BY_CONFIG_NAME[state.data_type].name, state.dims)
