"""`DeviceInstance`: an instance of a model on a GPU, whatever backend runs it; the counterpart of `ArrayInstance`.

A batch is put together in pinned memory, copied to the device, run, and copied back, each on a stream and each after the
one before by an event, so that the thread waits for nothing but the end. There are two sets of buffers: one batch is put
together and copied while the one before it runs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from schemas.datatypes import name_of_numpy
from schemas.errors import WeirError, internal
from schemas.execution_config import CudaOptimization, OptimizationPolicy, PinnedMemoryBuffer
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from worker.backend import DeviceLost, Execution, InstanceDevice, Pending, Result
from worker.batch_inputs import BatchInputs
from worker.batch_outputs import BatchOutputs
from worker.batch_tensors import BatchAssembler, InputPieces, ragged_inputs
from worker.cuda.buffers import BatchBuffers
from worker.cuda.graphs import RunGraphs, specified_shapes
from worker.cuda.pinned import PINNED
from worker.cuda.stream import InstanceStreams
from worker.device_runner import DeviceRunner, DeviceTensor, InstanceStream
from worker.tensor_declarations import NamedDatatype

logger = logging.getLogger("weir.worker")

_BATCHES_UNDER_WAY = 2
"""One that the GPU runs, and one that is on its way there; see `worker.backend.Instance.execute`."""


class DeviceInstance:
    """See the module, and `worker.backend.Instance`.

    `open_runner` makes what runs the model, on the stream that it is given. `outputs` and then those of `states` that are
    none of them are the names that the runner answers with. Made, used and closed in one thread. Raises WeirError, or
    DeviceLost.
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
        self._outputs = BatchOutputs(config, outputs, states)
        self._batching = config.max_batch_size > 0
        self._assembler = BatchAssembler(ragged_inputs(config))
        self._batch_inputs = BatchInputs(config) or None
        self._streams = streams = InstanceStreams(device.device_id, cuda.output_copy_stream)
        self._sets = [
            BatchBuffers(streams, pins_inputs, pins_outputs, cuda.busy_wait_events) for _ in range(_BATCHES_UNDER_WAY)
        ]
        PINNED.is_available = True
        self._graphs: list[RunGraphs] = []
        self._free = deque(range(_BATCHES_UNDER_WAY))
        self._runner = open_runner(streams.compute)
        try:
            if cuda.graphs:
                self._prepare_graphs(config, cuda)
            streams.synchronize()
        except BaseException:
            self._runner.close()
            raise

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Pending:
        """See `worker.backend.Instance`."""
        if not self._free:
            raise internal(f"{self._name} has {_BATCHES_UNDER_WAY} batches under way already")
        # Not simply in turns: between two batches under way requests of one that has failed may be run alone.
        number = self._free.popleft()
        try:
            return self._begin(number, requests, execution)
        except DeviceLost:
            raise
        except BaseException:
            self._free.append(number)
            # Whatever it has been told to do: the buffers are for another batch now. This also tells a GPU that is lost
            # from a backend's own error, however the backend calls it.
            self._streams.synchronize()
            raise

    def close(self) -> None:
        """See `worker.backend.Instance`."""
        try:
            self._streams.synchronize()
        except (WeirError, DeviceLost) as error:
            logger.warning("%s: closed while its GPU fails: %s", self._name, error)
        self._graphs.clear()
        self._runner.close()

    def has_ended(self, number: int) -> None:
        """A batch has been waited for: after its results set `number` may be another's."""
        self._free.append(number)

    def results_of(self, requests: Sequence[InferRequest], arrays: Sequence[np.ndarray]) -> list[Result]:
        """The results of a batch whose outputs have arrived in `arrays`."""
        if self._outputs.has_states:
            # States outlast the batch, which may also be run in more pieces than there are buffers.
            arrays = [np.array(array) for array in arrays]
        return self._outputs.results(requests, arrays)

    def _begin(self, number: int, requests: Sequence[InferRequest], execution: Execution) -> Pending:
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
        return _DeviceRun(self, number, buffers, requests, execution, outputs, arrays)

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
        on_host += self._runner.host_inputs
        if not self._runner.can_capture or on_host:
            why = f"input '{on_host[0]}' stays on the host" if on_host else "its backend can't be recorded"
            logger.warning("model '%s' runs without CUDA graphs: %s", config.name, why)
            return
        specified = specified_shapes(config, cuda)
        for _ in self._sets:
            graphs = RunGraphs(config.name, self._streams, self._runner, prepared_only=bool(specified))
            for shapes in specified:
                graphs.prepare(shapes)
            self._graphs.append(graphs)


class _DeviceRun(Pending):
    """A batch in set `number`. `kept` is what the GPU reads or writes until it is done, of which nobody else has a hold."""

    def __init__(
        self,
        instance: DeviceInstance,
        number: int,
        buffers: BatchBuffers,
        requests: Sequence[InferRequest],
        execution: Execution,
        outputs: Sequence[DeviceTensor | np.ndarray],
        kept: object,
    ) -> None:
        self._instance = instance
        self._number = number
        self._buffers = buffers
        self._requests = requests
        self._execution = execution
        self._kept: object = (outputs, kept)
        self._arrays = buffers.copy_out(outputs)

    def results(self) -> list[Result]:
        buffers, execution = self._buffers, self._execution
        try:
            buffers.outputs_copied.synchronize("running a batch")
        finally:
            self._instance.has_ended(self._number)
            self._kept = None
        # The thread saw nothing of what the GPU did, but events know when.
        done_ns = time.monotonic_ns()
        infer_end_ns = done_ns - buffers.run_ended.ns_until(buffers.outputs_copied)
        input_end_ns = infer_end_ns - buffers.run_begun.ns_until(buffers.run_ended)
        execution.input_end_ns = max(execution.start_ns, input_end_ns)
        execution.infer_end_ns = max(execution.input_end_ns, infer_end_ns)
        return self._instance.results_of(self._requests, self._arrays)
