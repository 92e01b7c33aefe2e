"""What an access policy costs: CPU of a request by what it shows, to that without a policy.

    python -m benchmarks.access [--rounds 5] [--seconds 2]

Two servers of the same model (64 bytes in and out), one with a policy, are up at once. The same load takes turns between
the server without a policy and requests to the other one that show nothing, a key, and a token. CPU is that of all
processes of a server, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from benchmarks.cluster.clients import table
from benchmarks.compare.networks import NETWORKS
from benchmarks.compare.targets import Protocol
from benchmarks.tls import IN_FLIGHT, Place, request_us
from weir.server import Server

NETWORK = NETWORKS["identity_fp32"]
POLICY = """
roles:
  anonymous: {rules: [{model: identity*, actions: [infer, health, metadata]}]}
  caller: {rules: [{model: "identity*", actions: [infer, metadata]}, {model: other, versions: [1], actions: [infer]}]}
tokens:
  - {issuer: https://issuer.test, audience: weir, keys: issuer.json}
"""


@contextlib.contextmanager
def places(folder: Path) -> Iterator[tuple[Place, ...]]:
    """The server without a policy, and the other one with each kind of client."""
    NETWORK.write(folder / "models", "onnxruntime")
    (folder / "policy.yaml").write_text(POLICY)
    issuer = rsa.generate_private_key(65537, 2048)
    row = {**RSAAlgorithm.to_jwk(issuer.public_key(), as_dict=True), "kid": "k"}
    (folder / "issuer.json").write_text(json.dumps({"keys": [row]}))
    claims = {"iss": "https://issuer.test", "aud": "weir", "sub": "bob", "roles": ["caller"], "exp": time.time() + 3600}
    token = jwt.encode(claims, issuer, "RS256", {"kid": "k"})
    keys = folder / "keys.json"
    words = ["key", "create", "bob", "--role=caller", f"--file={keys}"]
    key = subprocess.run(
        [sys.executable, "-m", "weir", *words], capture_output=True, text=True, check=True
    ).stdout.strip()
    guarded_by = {"access_policy": str(folder / "policy.yaml"), "access_keys": str(keys)}
    with Server(folder / "models") as plain, Server(folder / "models", **guarded_by) as guarded:
        yield (
            Place("no policy", plain),
            Place("nothing shown", guarded),
            Place("key", guarded, authorization=f"Bearer {key}"),
            Place("token", guarded, authorization=f"Bearer {token}"),
        )


async def measured(of: tuple[Place, ...], rounds: int, seconds: float) -> None:
    """Measures and prints the table."""
    rows = []
    for protocol in Protocol:
        for in_flight in IN_FLIGHT:
            turns = []
            for number in range(rounds + 1):
                order = of[number % len(of) :] + of[: number % len(of)]
                found = {place.name: await request_us(place, protocol, in_flight, seconds) for place in order}
                turns.append([found[place.name] for place in of])
            base = statistics.median(turn[0] for turn in turns[1:])
            ratios = [statistics.median(turn[n] / turn[0] for turn in turns[1:]) for n in range(1, len(of))]
            rows.append((protocol.value, in_flight, f"{base:.0f}", *(f"{ratio:.2f}" for ratio in ratios)))
    print(table(("protocol", "in flight", "no policy us", *(place.name for place in of[1:])), rows))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="access-") as folder, places(Path(folder)) as of:
        asyncio.run(measured(of, options.rounds, options.seconds))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
