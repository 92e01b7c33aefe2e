"""`DeviceInstance` on a real GPU: results, overlap of copies with the run before them, and errors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fakes.cuda_device import GPU, OUT, config, execution, numbers, run, values
from weir.worker.backend_api.interface import DeviceTensor, InstanceStream
from weir.worker.cuda.device_instance import DeviceInstance

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[4]


class _Memory:
    """Device memory for torch."""

    def __init__(self, tensor: DeviceTensor) -> None:
        shape = tuple(tensor.shape)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (tensor.pointer, False),
            "version": 3,
        }


class TorchRunner:
    """Returns twice the input plus one; keeps the GPU busy for `cycles` afterwards."""

    host_inputs = ()
    can_capture = True

    def __init__(self, stream: InstanceStream, cycles: int = 0) -> None:
        self._torch = pytest.importorskip("torch")
        self._instance_stream = stream
        self._stream = self._torch.cuda.ExternalStream(stream.handle, device=f"cuda:{stream.device_id}")
        self._cycles = cycles

    def enqueue(self, inputs: Mapping[str, Any]) -> Sequence[DeviceTensor]:
        torch, tensor = self._torch, inputs["IN"]
        memory = self._instance_stream.allocate(4 * int(np.prod(tensor.shape)))
        output = DeviceTensor("FP32", tensor.shape, memory.pointer, memory)
        with torch.cuda.stream(self._stream):
            given = torch.as_tensor(_Memory(tensor), device=f"cuda:{self._instance_stream.device_id}")
            made = torch.as_tensor(_Memory(output), device=f"cuda:{self._instance_stream.device_id}")
            torch.mul(given, 2, out=made)
            made.add_(1)
            if self._cycles:
                torch.cuda._sleep(self._cycles)
        return [output]

    def close(self) -> None:
        pass


def opened(cycles: int = 0, **cuda: Any) -> DeviceInstance:
    return DeviceInstance(lambda stream: TorchRunner(stream, cycles), GPU, config(optimization={"cuda": cuda}), OUT)


@pytest.fixture(params=[{}, {"output_copy_stream": True}, {"busy_wait_events": True}, {"graphs": True}], ids=str)
def instance(request: pytest.FixtureRequest) -> Iterator[DeviceInstance]:
    made = opened(**request.param)
    yield made
    made.close()


def test_each_request_gets_its_own_rows(instance: DeviceInstance) -> None:
    generator = np.random.default_rng(1)
    under_way: list[tuple[np.ndarray, Any]] = []
    for number in range(60):
        rows = generator.random((1 + number % 4, int(generator.integers(1, 400_000))), np.float32)
        if number % 3:
            rows = rows[:, :1000]
        under_way.append((rows, instance.execute([numbers(row) for row in rows], execution())))
        if len(under_way) == 2:
            wanted, pending = under_way.pop(0)
            for row, result in zip(wanted, pending.results(), strict=True):
                np.testing.assert_array_equal(result.outputs[0].to_numpy()[0], row * 2 + 1)
    under_way[0][1].results()


def test_a_batch_is_copied_while_the_one_before_it_runs() -> None:
    instance = opened(cycles=200_000_000, output_copy_stream=True)
    run(instance, numbers(np.zeros(4_000_000)))
    run(instance, numbers(np.zeros(4_000_000)))
    first = instance.execute([numbers(np.full(4_000_000, 1))], execution())
    second = instance.execute([numbers(np.full(4_000_000, 2))], execution())
    assert (first.results()[0].outputs[0].to_numpy() == 3).all()  # type: ignore[union-attr,index]
    assert (second.results()[0].outputs[0].to_numpy() == 5).all()  # type: ignore[union-attr,index]
    before, after = instance._sets
    copied_before_the_end_ns = after.inputs_copied.ns_until(before.run_ended)
    ran_ns = before.run_started.ns_until(before.run_ended)
    print(f"copied {copied_before_the_end_ns / 1e6:.1f} ms before the end of the run, which took {ran_ns / 1e6:.1f} ms")
    assert 0 < copied_before_the_end_ns < ran_ns
    # And what came of the first was on the host while the second one ran.
    assert after.run_started.ns_until(before.outputs_copied) >= 0
    assert before.outputs_copied.ns_until(after.run_ended) > 0
    instance.close()


@pytest.mark.timing
def test_execute_returns_before_the_gpu_is_done() -> None:
    instance = opened(cycles=200_000_000)
    run(instance, numbers([1]))
    begun_s = time.monotonic()
    pending = instance.execute([numbers([1])], execution())
    told_s = time.monotonic() - begun_s
    assert values(pending.results()) == [[[3]]]  # type: ignore[union-attr]
    assert told_s < (time.monotonic() - begun_s) / 4
    instance.close()


def test_events_measure_the_run_of_the_model() -> None:
    instance = opened(cycles=200_000_000)
    run(instance, numbers([1]))
    told = execution()
    begun_ns = time.monotonic_ns()
    instance.execute([numbers([1])], told).results()  # type: ignore[union-attr]
    assert 10_000_000 < told.infer_end_ns - told.input_end_ns <= time.monotonic_ns() - begun_ns
    instance.close()


_LOSING = """
import numpy as np, torch
from test_device_instance_gpu import TorchRunner, config, execution, GPU, OUT, numbers
from weir.worker.backend_api.interface import DeviceLost
from weir.worker.cuda.device_instance import DeviceInstance

class Asserting(TorchRunner):
    def enqueue(self, inputs):
        outputs = super().enqueue(inputs)
        with torch.cuda.stream(self._stream):
            torch.zeros(3, device="cuda")[torch.full((1,), 10, device="cuda")]
        return outputs

instance = DeviceInstance(lambda stream: Asserting(stream), GPU, config(), OUT)
for _ in range(2):
    try:
        instance.execute([numbers([1])], execution()).results()
    except DeviceLost as lost:
        print(lost)
"""


def test_a_sticky_error_loses_the_device() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _LOSING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = told.stdout.splitlines()
    assert len(lines) == 2, told.stderr
    assert all(line.startswith("CUDA error cuda") and "can't be used by this process" in line for line in lines)
