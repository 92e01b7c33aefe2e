"""The access policy of `--policy`: everything needs a key but health, and all clients of the suite show one.

A client finds the key in the variable WEIR_API_KEY, as the commands of `weir` do (`authorization`).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.faults.loads.http_caller import HttpCaller

_POLICY = """
roles:
  anonymous: {rules: [{actions: [health]}]}
  client:
    rules:
      - {model: "*", actions: [infer, metadata, statistics, load, jobs]}
      - {actions: [metrics]}
"""
_PATIENCE_S = 30.0
_LOOK_S = 0.05
_GUARDED = "/v2"


def write_policy(folder: Path) -> Path:
    """The file of the policy, in this folder."""
    path = folder / "policy.yaml"
    path.write_text(_POLICY)
    return path


async def new_key(place: str) -> str:
    """A new key of the role `client` at `place`, as --nats=URL or --file=FILE. Raises RuntimeError where none is made."""
    words = ("key", "create", "faults", "--role=client", place)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "weir", *words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    key, said = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"no key was made: {said.decode(errors='replace')}")
    return key.decode().strip()


async def lets_in_the_key_alone(address: tuple[str, int]) -> None:
    """Waits until a gateway lets in the key; raises RuntimeError where it lets in a client without one."""
    with_key, without = HttpCaller(address), HttpCaller(address, shown={})
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while (await with_key.ask(_GUARDED, method="GET")).status != 200:
                await asyncio.sleep(_LOOK_S)
            if (status := (await without.ask(_GUARDED, method="GET")).status) != 401:
                raise RuntimeError(f"a client without a key was answered {status}")
    finally:
        with_key.close()
        without.close()
