"""`DeviceInstance`: an instance of a model on a GPU, for any backend; the counterpart of `ArrayInstance` on the host.

A batch is joined in pinned memory, copied to the device, run, and copied back. Each step is enqueued on a stream and
ordered after the one before it by an event, so that the thread waits only for the end. With two sets of buffers, a batch is
joined and copied while the one before it runs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weir.schemas.config.model_config import CudaOptimization, ModelConfig, OptimizationPolicy, PinnedMemoryBuffer
from weir.schemas.core.errors import WeirError, internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import name_of_numpy
from weir.worker.backend_api.interface import (
    MAX_DEVICE_BATCHES,
    DeviceLost,
    DeviceRunner,
    DeviceTensor,
    Execution,
    ExecutionHandle,
    InstanceDevice,
    InstanceStream,
    Result,
)
from weir.worker.cuda.buffers import BatchBuffers
from weir.worker.cuda.graphs import RunGraphs, specified_shapes
from weir.worker.cuda.pinned import PINNED
from weir.worker.cuda.region_outputs import RegionOutputs, region_outputs
from weir.worker.cuda.stream import InstanceStreams
from weir.worker.execution.batch_tensors import (
    BatchAssembler,
    BatchInputs,
    BatchOutputs,
    InputPieces,
    NamedDatatype,
    ragged_inputs,
)
from weir.worker.execution.sequences import control_datatypes

logger = logging.getLogger("weir.worker")


class DeviceInstance:
    """An `Instance` whose batches run on a GPU. It is created, used and closed in one thread.

    `open_runner` creates the backend's runner of the model for a stream. The runner returns `outputs`, then the `states`
    that are not outputs. Raises WeirError, or DeviceLost.
    """

    def __init__(
        self,
        open_runner: Callable[[InstanceStream], DeviceRunner],
        device: InstanceDevice,
        config: ModelConfig,
        outputs: Sequence[NamedDatatype],
        states: Sequence[NamedDatatype] = (),
    ) -> None:
        optimization = config.optimization or OptimizationPolicy()
        cuda = optimization.cuda or CudaOptimization()
        pins_inputs, pins_outputs = (
            (pinned or PinnedMemoryBuffer(enable=True)).enable
            for pinned in (optimization.input_pinned_memory, optimization.output_pinned_memory)
        )
        self._name = device.name
        self.region_gpu = device.device_id
        """Clients' memory on this GPU is copied within it."""
        self._outputs = BatchOutputs(config, outputs, states)
        self._batching = config.max_batch_size > 0
        self._assembler = BatchAssembler(ragged_inputs(config))
        self._batch_inputs = BatchInputs(config) or None
        self._streams = streams = InstanceStreams(device.device_id, cuda.output_copy_stream)
        self._sets = [
            BatchBuffers(streams, pins_inputs, pins_outputs, cuda.busy_wait_events) for _ in range(MAX_DEVICE_BATCHES)
        ]
        PINNED.is_available = True
        self._graphs: list[RunGraphs] = []
        self._free = deque(range(MAX_DEVICE_BATCHES))
        self._runner = open_runner(streams.compute)
        try:
            if cuda.graphs:
                self._prepare_graphs(config, cuda)
            streams.synchronize()
        except BaseException:
            self._runner.close()
            raise

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> ExecutionHandle:
        """Enqueues the batch and returns a handle to wait for it."""
        if not self._free:
            raise internal(f"{self._name} runs {MAX_DEVICE_BATCHES} batches already")
        # Not simply alternating: requests of a failed batch may run again while another batch is on the device.
        number = self._free.popleft()
        try:
            return self._start(number, requests, execution)
        except DeviceLost:
            raise
        except BaseException:
            self._free.append(number)
            # Another batch gets the buffers, so the GPU must be done with them. This also raises DeviceLost if the GPU is
            # lost, whatever error the backend has raised.
            self._streams.synchronize()
            raise

    def close(self) -> None:
        """Waits for the device, closes the runner, and returns the memory that nothing uses any more to the GPU."""
        try:
            self._streams.synchronize()
        except (WeirError, DeviceLost) as error:
            logger.warning("%s: closed while its GPU fails: %s", self._name, error)
        self._graphs.clear()
        self._sets.clear()
        self._runner.close()
        try:
            self._streams.trim()
        except (WeirError, DeviceLost) as error:
            logger.warning("%s: memory of its GPU stays in the process's pool: %s", self._name, error)

    def has_ended(self, number: int) -> None:
        """Releases set `number` of buffers, whose batch has ended."""
        self._free.append(number)

    def results_of(self, requests: Sequence[InferRequest], arrays: Sequence[np.ndarray]) -> list[Result]:
        """The results of a batch with these output arrays."""
        if self._outputs.has_states:
            # States are kept longer than the buffers, which the next batch uses.
            arrays = [np.array(array) for array in arrays]
        return self._outputs.results(requests, arrays)

    def _start(self, number: int, requests: Sequence[InferRequest], execution: Execution) -> ExecutionHandle:
        buffers = self._sets[number]
        pieces, arrays = self._assembler.pieces(requests, self._batching, execution.reader, self._runner.host_inputs)
        if self._batch_inputs is not None:
            self._add_batch_inputs(self._batch_inputs.of(requests), pieces, arrays)
        graphs = self._graphs[number] if self._graphs and not arrays else None
        graph = graphs.of(pieces) if graphs is not None else None
        if graph is not None:
            buffers.copy_in(pieces, graph.inputs)
            graph.launch()
            outputs = graph.outputs
        else:
            outputs = self._runner.enqueue({**buffers.copy_in(pieces), **arrays})
            self._check(outputs)
            if graphs is not None:
                graphs.has_run(pieces)
        in_regions = region_outputs(requests, execution.output_regions, self._outputs, outputs, self._batching)
        on_host = buffers.copy_out(outputs, in_regions.parts, in_regions.only)
        return _DeviceRun(self, number, buffers, requests, execution, on_host, in_regions, kept=(outputs, arrays))

    def _add_batch_inputs(
        self, values: Mapping[str, np.ndarray], pieces: list[InputPieces], arrays: dict[str, np.ndarray]
    ) -> None:
        for name, array in values.items():
            if name in self._runner.host_inputs:
                arrays[name] = array
            else:
                datatype = name_of_numpy(array.dtype) or "INT32"
                pieces.append(InputPieces(name, datatype, array.shape, [array.tobytes()], array.nbytes))

    def _check(self, outputs: Sequence[DeviceTensor | np.ndarray]) -> None:
        if len(outputs) != len(self._outputs.names):
            raise internal(f"the model has {len(outputs)} outputs instead of {len(self._outputs.names)}")
        for (name, datatype), output in zip(self._outputs.names, outputs, strict=True):
            if isinstance(output, DeviceTensor) and output.datatype != datatype:
                raise internal(f"output '{name}' is {output.datatype}, but the configuration specifies {datatype}")

    def _prepare_graphs(self, config: ModelConfig, cuda: CudaOptimization) -> None:
        on_host = [tensor.name for tensor in config.input if tensor.data_type == "TYPE_STRING"]
        on_host += [name for name, datatype in control_datatypes(config).items() if datatype == "BYTES"]
        on_host += self._runner.host_inputs
        if not self._runner.can_capture or on_host:
            reason = f"input '{on_host[0]}' stays on the host" if on_host else "its backend can't be captured"
            logger.warning("model '%s' runs without CUDA graphs: %s", config.name, reason)
            return
        specified = specified_shapes(config, cuda)
        for _ in self._sets:
            graphs = RunGraphs(config.name, self._streams, self._runner, prepared_only=bool(specified))
            for shapes in specified:
                graphs.prepare(shapes)
            self._graphs.append(graphs)


@dataclass(slots=True, eq=False)
class _DeviceRun(ExecutionHandle):
    """A batch that the GPU works on, with the buffers of set `number`.

    `arrays` are those of the outputs on the host. `kept` is device memory that the GPU uses until the run ends.
    """

    instance: DeviceInstance
    number: int
    buffers: BatchBuffers
    requests: Sequence[InferRequest]
    execution: Execution
    arrays: Sequence[np.ndarray]
    in_regions: RegionOutputs
    kept: object

    def results(self) -> list[Result]:
        buffers, execution = self.buffers, self.execution
        try:
            buffers.outputs_copied.synchronize("running a batch")
        finally:
            self.instance.has_ended(self.number)
            self.kept = None
        # The phases are measured by the events of the GPU.
        done_ns = time.monotonic_ns()
        infer_end_ns = done_ns - buffers.run_ended.ns_until(buffers.outputs_copied)
        input_end_ns = infer_end_ns - buffers.run_started.ns_until(buffers.run_ended)
        execution.input_end_ns = max(execution.start_ns, input_end_ns)
        execution.infer_end_ns = max(execution.input_end_ns, infer_end_ns)
        results = self.instance.results_of(self.requests, self.arrays)
        self.in_regions.mark(results)
        return results
