"""Whether a server answers rightly: many different requests at once, compared with ONNX Runtime.

A server that hands a batch's answers back in the wrong order is fast, and so is one that answers with errors.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.compare.networks import Network
from benchmarks.compare.payload import Payload
from benchmarks.compare.servers import Server
from benchmarks.compare.targets import Protocol

_AT_ONCE = 32


def check_answers(server: Server, network: Network, protocol: Protocol) -> None:
    """Raises SystemExit when an answer is missing or wrong."""
    inputs = [network.sample(seed) for seed in range(16 if network.name == "cnn" else 64)]
    payloads = [Payload.of(protocol, network, x) for x in inputs]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            answers = list(pool.map(lambda payload: payload.ask(server.address(protocol)), payloads))
        except Exception as error:  # whatever a client library raises
            raise SystemExit(f"{server.name} does not answer {network.name} over {protocol}: {error}") from error
    expected = [network.run(x) for x in inputs]
    wrong = sum(not np.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in zip(answers, expected, strict=True))
    if wrong:
        raise SystemExit(f"{server.name} answers {wrong} of {len(inputs)} requests of {network.name} wrongly")
