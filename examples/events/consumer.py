"""Show the results of a model's durable requests as they come, each once, whoever published them.

    python -m examples.events.consumer [--url=nats://localhost:4222] [--model=file_kind] [--name=shower] [--count=10]

The broker remembers under `--name` what was shown: a consumer that is started again goes on where it was. Several of one
name share the results between them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os

import nats
from nats.errors import TimeoutError as NothingCame
from nats.js.api import AckPolicy, ConsumerConfig

SHOWN = 60
"""Characters of an output."""
PATIENCE_S = 5.0
AT_ONCE = 64


def outputs_of(body: bytes, headers: dict[str, str]) -> str:
    """What the model said, in short; or why it said nothing."""
    if "Weir-Object" in headers:
        return f"(object {headers['Weir-Object']} of store results)"
    length = headers.get("Inference-Header-Content-Length")
    answer = json.loads(body[: int(length)] if length else body)
    if "error" in answer:
        return str(answer["error"])
    outputs = (f"{output['name']} {output.get('data', output['shape'])}" for output in answer["outputs"])
    return " ".join(text if len(text) <= SHOWN else f"{text[:SHOWN]}…" for text in outputs)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url", default=os.environ.get("NATS_URL", "nats://localhost:4222"), help="the broker (NATS_URL)"
    )
    parser.add_argument("--model", default="file_kind", help="whose results")
    parser.add_argument("--name", default="shower", help="what the broker calls this consumer")
    parser.add_argument("--count", type=int, help="end after so many; without it, at Ctrl-C")
    options = parser.parse_args()
    client = await nats.connect(options.url)
    jetstream = client.jetstream()
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=30)
    results = await jetstream.pull_subscribe(f"result.{options.model}.*", options.name, "RESULT", config)
    shown = 0
    while options.count is None or shown < options.count:
        wanted = AT_ONCE if options.count is None else min(AT_ONCE, options.count - shown)
        try:
            records = await results.fetch(wanted, timeout=PATIENCE_S)
        except NothingCame:
            continue
        for record in records:
            told = record.headers or {}
            ms = int(told.get("Weir-Ended-Ms", 0)) - int(told.get("Weir-Accepted-Ms", 0))
            print(f"{told['Weir-Id']}  {told['Weir-Outcome']:<9} {ms:>7} ms  {outputs_of(record.data, told)}")
            await record.ack()  # only now: what was not shown comes again
            shown += 1
    await client.close()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
