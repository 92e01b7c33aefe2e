"""A stand-in for the `nats` command, on nats-py, because no package registry has the command itself.

It implements the flags that the documentation uses with the meaning of the command's own help (nats-io/natscli, 0.2:
`pub`, `sub`, `consumer add`, `consumer next`, `stream get`) and rejects all others. The server is `NATS_URL`. A test
that uses it shows that these flags mean what the page says, not that the command behaves so; its output equals the
command's except for times and the order of headers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RawStreamMsg, ReplayPolicy

TIMEOUT_S = 30.0

READY_FILE = "NATS_CLI_READY"
"""Names a file that `sub` makes once it is subscribed."""


def parsed(words: list[str]) -> argparse.Namespace:
    """The options of a command line. Ends the program where there is no such command or flag."""
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if name is None:
        raise SystemExit(f"nats: error: {' '.join(words)} is none of the documented commands")
    parser = argparse.ArgumentParser(prog=f"nats {name}", allow_abbrev=False)
    add_arguments, run = COMMANDS[name]
    add_arguments(parser)
    parser.set_defaults(run=run)
    return parser.parse_intermixed_args(words[len(name.split()) :])


def publish_arguments(pub: argparse.ArgumentParser) -> None:
    pub.add_argument("subject")
    pub.add_argument("body", nargs="?")
    pub.add_argument("-J", "--jetstream", action="store_true")
    pub.add_argument("-H", "--header", action="append", default=[])
    pub.add_argument("--force-stdin", action="store_true")
    pub.add_argument("--no-templates", action="store_true")


def subscribe_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("subject")
    sub.add_argument("--count", type=int, required=True)  # without it, it has no end
    sub.add_argument("-r", "--raw", action="store_true")
    sub.add_argument("--last-per-subject", action="store_true")


def add_consumer_arguments(add: argparse.ArgumentParser) -> None:
    add.add_argument("stream")
    add.add_argument("name")
    add.add_argument("--filter", required=True)
    add.add_argument("--pull", action="store_true", required=True)
    add.add_argument("--deliver", choices=[policy.value for policy in DeliverPolicy], required=True)
    add.add_argument("--ack", choices=[policy.value for policy in AckPolicy], required=True)
    add.add_argument("--replay", choices=[policy.value for policy in ReplayPolicy], required=True)
    add.add_argument("--defaults", action="store_true", required=True)  # else it asks for the rest


def consume_arguments(following: argparse.ArgumentParser) -> None:
    following.add_argument("stream")
    following.add_argument("name")
    following.add_argument("--count", type=int, default=1)
    following.add_argument("-r", "--raw", action="store_true")


def get_last_arguments(get: argparse.ArgumentParser) -> None:
    get.add_argument("stream")
    get.add_argument("-S", "--last-for", required=True)


async def publish(client: Client, options: argparse.Namespace) -> None:
    body = sys.stdin.buffer.read() if options.force_stdin else (options.body or "").encode()
    assert options.no_templates or b"{{" not in body, "the command would take this for a template"
    headers = dict(header.split(":", 1) for header in options.header)
    if not options.jetstream:
        await client.publish(options.subject, body, headers=headers)
        return
    stored = json.loads((await client.request(options.subject, body, 5, headers=headers or None)).data)
    if "error" in stored:
        raise SystemExit(f"nats: error: {stored['error']['description']}")
    duplicate = " Duplicate: true" if stored.get("duplicate") else ""
    say(f"Stored in Stream: {stored['stream']} Sequence: {stored['seq']}{duplicate}")


def say(text: str) -> None:
    """Prints lines in one piece: two commands may print at the same time."""
    sys.stdout.write(f"{text}\n")


async def subscribe(client: Client, options: argparse.Namespace) -> None:
    if options.last_per_subject:
        config = ConsumerConfig(deliver_policy=DeliverPolicy.LAST_PER_SUBJECT, ack_policy=AckPolicy.NONE)
        messages = await client.jetstream().subscribe(options.subject, config=config)
    else:
        messages = await client.subscribe(options.subject)
    await client.flush()
    if ready := os.environ.get(READY_FILE):
        await asyncio.to_thread(Path(ready).touch)
    for number in range(1, options.count + 1):
        message = await messages.next_msg(TIMEOUT_S)
        if options.raw:
            say(message.data.decode())
            continue
        if options.last_per_subject:
            at = f"stream: {message.metadata.stream} seq {message.metadata.sequence.stream}"
            time = message.metadata.timestamp.isoformat()
            say(f"[#{number}] Received JetStream message: {at} / subject: {message.subject} / time: {time}")
        else:
            say(f'[#{number}] Received on "{message.subject}"')
        show(message)


async def add_consumer(client: Client, options: argparse.Namespace) -> None:
    config = ConsumerConfig(
        durable_name=options.name,
        filter_subject=options.filter,
        deliver_policy=DeliverPolicy(options.deliver),
        ack_policy=AckPolicy(options.ack),
        replay_policy=ReplayPolicy(options.replay),
    )
    await client.jetstream().add_consumer(options.stream, config)
    say(f"Information for Consumer {options.stream} > {options.name}")


async def consume(client: Client, options: argparse.Namespace) -> None:
    consumer = await client.jetstream().pull_subscribe_bind(options.name, options.stream)
    for _ in range(options.count):
        (message,) = await consumer.fetch(1, TIMEOUT_S)
        if options.raw:
            say(message.data.decode())
        else:
            say(f"[{message.metadata.timestamp:%H:%M:%S}] subj: {message.subject}")
            show(message)
        await message.ack()


async def get_last(client: Client, options: argparse.Namespace) -> None:
    message = await client.jetstream().get_last_msg(options.stream, options.last_for)
    say(f"Item: {options.stream}#{message.seq} received {message.time} on Subject {message.subject}\n\nHeaders:")
    show(message, "  ")


def show(message: Msg | RawStreamMsg, indent: str = "") -> None:
    for name, value in (message.headers or {}).items():
        say(f"{indent}{name}: {value}")
    say(f"\n{(message.data or b'').decode()}\n")


Run = Callable[[Client, argparse.Namespace], Awaitable[None]]

COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Run]] = {
    "pub": (publish_arguments, publish),
    "sub": (subscribe_arguments, subscribe),
    "consumer add": (add_consumer_arguments, add_consumer),
    "consumer next": (consume_arguments, consume),
    "stream get": (get_last_arguments, get_last),
}


async def main() -> None:
    options = parsed(sys.argv[1:])
    client = await nats.connect(os.environ["NATS_URL"])
    try:
        await options.run(client, options)
        await client.flush()
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())
