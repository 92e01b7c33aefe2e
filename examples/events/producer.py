"""Publish files to model `file_kind`, to be recognised whenever there is time: many at once, each acknowledged.

    python -m examples.events.producer [--url=nats://localhost:4222] [--atomic=100] [file ...]

A file that is acknowledged is on disk and will have its result; `examples.events.consumer` shows them. A file's id is a
digest of its content, so that nothing is asked twice, however often this runs: what got no acknowledgement is published
again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import time
import uuid
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.errors import NoRespondersError
from nats.js.errors import APIError

MODEL = "file_kind"
SUBJECT = f"event.{MODEL}"
TRIES = 10
MOST_BYTES = 4 << 20
"""Of one file: a message must fit into the broker's."""


class Request:
    """One file as a message: KServe JSON, and the file behind it as a binary tensor."""

    def __init__(self, path: Path) -> None:
        file = path.read_bytes()[:MOST_BYTES]
        given = {
            "name": "FILE",
            "datatype": "BYTES",
            "shape": [1, 1],
            "parameters": {"binary_data_size": 4 + len(file)},
        }
        best = {"name": "KIND", "parameters": {"classification": 1}}
        asked = {"inputs": [given], "outputs": [best], "parameters": {"path": str(path)}}
        header = json.dumps(asked).encode()
        self.body = header + len(file).to_bytes(4, "little") + file
        self.headers = {
            "Nats-Msg-Id": hashlib.sha256(self.body).hexdigest()[:16],
            "Inference-Header-Content-Length": str(len(header)),
        }


async def publish_each(client: Client, paths: list[Path], window: int) -> int:
    """Publishes every file as a message of its own, `window` of them unacknowledged; how many were there already."""
    jetstream = client.jetstream()
    room = asyncio.Semaphore(window)

    async def publish(path: Path) -> bool:
        async with room:
            request = Request(path)
            for tried in range(TRIES):
                try:
                    stored = await jetstream.publish(SUBJECT, request.body, headers=request.headers)
                    return bool(stored.duplicate)
                except (nats.errors.Error, OSError):  # it may be stored or not: the id makes it safe to say it again
                    if tried == TRIES - 1:
                        raise
                    await asyncio.sleep(0.1 * 2**tried)
        raise AssertionError

    return sum(await asyncio.gather(*map(publish, paths)))


async def publish_atomically(client: Client, paths: list[Path], size: int) -> int:
    """Publishes `size` files at a time, all or none of which are stored: one acknowledgement, and far less work."""
    for first in range(0, len(paths), size):
        some = paths[first : first + size]
        batch_id = uuid.uuid4().hex
        for number, path in enumerate(some, 1):
            request = Request(path)
            headers = {**request.headers, "Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
            if number < len(some):
                await client.publish(SUBJECT, request.body, headers=headers)
                continue
            headers["Nats-Batch-Commit"] = "1"
            said = json.loads((await client.request(SUBJECT, request.body, 10, headers=headers)).data)
            if "error" in said:
                raise APIError.from_error(said["error"])
    return 0


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="what to recognise; without any, some of this checkout")
    parser.add_argument(
        "--url", default=os.environ.get("NATS_URL", "nats://localhost:4222"), help="the broker (NATS_URL)"
    )
    parser.add_argument("--window", type=int, default=256, help="how many may wait for their acknowledgement")
    parser.add_argument("--atomic", type=int, metavar="COUNT", help="publish so many at a time, all or none")
    options = parser.parse_args()
    paths = options.files or sorted((Path(__file__).parents[2] / "weir/bus").glob("*.py"))
    client = await nats.connect(options.url)
    began = time.perf_counter()
    try:
        if options.atomic:
            duplicates = await publish_atomically(client, paths, options.atomic)
        else:
            duplicates = await publish_each(client, paths, options.window)
    except NoRespondersError:
        raise SystemExit("no stream takes these: is a gateway running?") from None
    finally:
        await client.close()
    took = time.perf_counter() - began
    print(f"{len(paths)} files are on disk after {took:.2f} s; {duplicates} of them were published before")


if __name__ == "__main__":
    asyncio.run(main())
