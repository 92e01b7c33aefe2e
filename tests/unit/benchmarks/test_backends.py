"""The networks of `benchmarks.backends`: the bare loop and the server run the same inputs."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.backends import NETWORKS
from tests.support.own_process import run_in_own_process
from weir.repository.config_text import parse_config
from weir.schemas.kserve.request import parse_infer_request

MODEST = [name for name in NETWORKS if name not in ("ocr_rec", "encoder")]
"""Without those that take seconds."""


def compare(name, folder):
    """Writes a network, and runs a batch and one request of it."""
    network = NETWORKS[name]
    version = network.write(Path(folder))
    config = parse_config((version.parent / "config.pbtxt").read_bytes(), "config.pbtxt")
    assert (config.name, config.max_batch_size, config.backend) == (name, network.batch, network.backend)
    assert [output.name for output in config.output] == list(network.outputs)
    run = network.open_engine(version, network.outputs)
    alone, together = run(network.request), run(network.full_batch)
    for one, all_of_them in zip(alone, together, strict=True):
        assert len(all_of_them) == network.batch
        np.testing.assert_allclose(all_of_them[-network.rows :], one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODEST)
def test_a_batch_answers_each_request_as_the_request_alone(name, tmp_path):
    run_in_own_process(compare, name, str(tmp_path))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_request_says_what_the_bare_loop_is_given(name):
    network = NETWORKS[name]
    payload = network.payload()
    length = int(payload.headers["Inference-Header-Content-Length"])
    request = parse_infer_request(name, "", payload.body, length)
    assert {tensor.name: tuple(tensor.shape) for tensor in request.inputs} == {
        key: array.shape for key, array in network.request.items()
    }
