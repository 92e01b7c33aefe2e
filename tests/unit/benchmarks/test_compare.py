"""The parts of `make bench` that determine the meaning of its figures; servers run in `make bench` only."""

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.compare.measurement import Measurement
from benchmarks.compare.networks import MAX_BATCH_SIZE, NETWORKS
from benchmarks.compare.payload import Payload
from benchmarks.compare.report import Report
from benchmarks.compare.targets import Baseline, Protocol, Quantity, Target, Workload
from weir.repository.config_text import parse_config
from weir.schemas.kserve.request import parse_infer_request

WORK = Workload("identity_fp32", 64)
CPU = Target("cpu", WORK, Quantity.CPU, Baseline.TRITON, 1.0, 0.6)
RATE = Target("rate", WORK, Quantity.RATE, Baseline.TRITON, 1.0, 1.6)


def measurement(server, number, cpu_ms):
    return Measurement(server, str(CPU.workload), number, "", 1, 1 / cpu_ms, 1.0, 1.0, cpu_ms)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_answers_each_item_of_a_batch_as_it_answers_it_alone(name):
    network = NETWORKS[name]
    inputs = [network.sample(seed) for seed in (1, 2)]
    together = network.run(np.concatenate(inputs))
    assert together.shape == (2, *network.output_dims)
    assert not np.allclose(*together)
    for row, x in zip(together, inputs, strict=True):
        np.testing.assert_allclose(network.run(x)[0], row, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_networks_configuration_is_one_that_weir_reads(name):
    config = parse_config(NETWORKS[name].config("onnxruntime").encode(), "config.pbtxt")
    assert (config.name, config.max_batch_size) == (name, MAX_BATCH_SIZE)
    assert tuple(config.input[0].dims) == NETWORKS[name].input_dims
    assert tuple(config.output[0].dims) == NETWORKS[name].output_dims


def test_both_payloads_carry_the_same_tensor():
    network = NETWORKS["mlp"]
    x = network.sample(3)
    http, grpc = (Payload.of(protocol, network, x) for protocol in Protocol)
    request = parse_infer_request("mlp", "", http.body, int(http.headers["Inference-Header-Content-Length"]))
    message = service_pb2.ModelInferRequest.FromString(grpc.body)
    assert http.path == "/v2/models/mlp/infer"
    assert (bytes(request.inputs[0].data), *request.inputs[0].shape) == (x.tobytes(), *x.shape)
    assert (message.raw_input_contents[0], *message.inputs[0].shape) == (x.tobytes(), *x.shape)


@pytest.mark.parametrize(
    "target, value, word",
    [
        (CPU, 0.6, "aim"),
        (CPU, 0.61, "must"),
        (CPU, 1.01, "no"),
        (CPU, None, "?"),
        (RATE, 1.6, "aim"),
        (RATE, 1.59, "must"),
        (RATE, 0.99, "no"),
    ],
)
def test_a_target_is_reached_from_its_better_side(target, value, word):
    assert target.reached(value) == word


def test_a_ratio_is_taken_within_a_round_so_that_a_slow_machine_slows_both(capsys):
    rounds = [("weir", 1.0, 3.0, 0.5), ("triton", 2.0, 5.0, 0.6)]
    Report(measurement(server, n, ms) for server, *cpu in rounds for n, ms in enumerate(cpu)).print([CPU], None)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith(CPU.key))
    # The rounds' ratios are 0.50, 0.60 and 0.83, their median is 0.60; that of the medians would be 0.50.
    assert row.split()[-6:] == ["0.60", "1.00", "×", "0.60", "×", "aim"]


def test_without_triton_its_ratios_are_unknown(capsys):
    Report([measurement("weir", 0, 0.1)]).print([CPU], None)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith(CPU.key))
    assert row.split()[-1] == "?"
