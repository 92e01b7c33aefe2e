"""What TLS to nats-server costs: CPU of a client and of the server for a message that is published and comes back.

    python -m benchmarks.nats_tls

One process publishes to itself, a window at a time; its own CPU time and the server's are divided by the messages.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

from bus.broker_access import BrokerAccess
from bus.connection import Bus, Message
from bus.embedded import find_binary

SIZES = ((64, 60_000, 64), (600_000, 1_500, 8))
"""Bytes, messages, and how many are on their way."""


def _certificates(folder: Path) -> None:
    names = folder / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    more = ("-CAcreateserial", "-days", "2", "-extfile", "names")
    for words in (
        ("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca"),
        ("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server"),
        (*("x509", "-req", "-in", "server.csr", "-out", "server.pem", "-CA", "ca.pem", "-CAkey", "ca.key"), *more),
    ):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


async def _measure(url: str, access: BrokerAccess, server: psutil.Process) -> list[tuple[int, float, float]]:
    rows = []
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "bench", background, access=access)
        for size, total, window in SIZES:
            room, came, done = asyncio.Semaphore(window), 0, asyncio.Event()

            def take(
                _: Message, room: asyncio.Semaphore = room, total: int = total, done: asyncio.Event = done
            ) -> None:
                nonlocal came
                came += 1
                room.release()
                if came == total:
                    done.set()

            unsubscribe = await bus.subscribe(f"bench.{size}", take)
            await bus.flush()
            own, its = time.process_time(), sum(server.cpu_times()[:2])
            body = bytes(size)
            for _ in range(total):
                await room.acquire()
                bus.publish(f"bench.{size}", body)
            await done.wait()
            spent = time.process_time() - own, sum(server.cpu_times()[:2]) - its
            rows.append((size, spent[0] / total * 1e6, spent[1] / total * 1e6))
            unsubscribe()
        await bus.close()
    return rows


def main() -> None:
    """Prints a row for each size, without TLS and with."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _certificates(folder)
        tls = {"cert_file": str(folder / "server.pem"), "key_file": str(folder / "server.key")}
        for name, options, access in (
            ("plain", {}, BrokerAccess()),
            ("TLS", {"tls": tls}, BrokerAccess(ca=str(folder / "ca.pem"))),
        ):
            ports = folder / name
            ports.mkdir()
            config = {"listen": "127.0.0.1:-1", "max_payload": 8 << 20, "ports_file_dir": str(ports), **options}
            (ports / "conf").write_text(json.dumps(config))
            server = subprocess.Popen([find_binary(), "-c", ports / "conf"], stderr=subprocess.DEVNULL)
            try:
                file = ports / f"nats-server_{server.pid}.ports"
                while not (file.exists() and file.read_text().endswith("}")):
                    time.sleep(0.02)
                url = json.loads(file.read_text())["nats"][0]
                for size, own, its in uvloop.run(_measure(url, access, psutil.Process(server.pid))):
                    print(f"{name:5} {size:7} B: client {own:8.1f} us, server {its:8.1f} us a message", flush=True)
            finally:
                server.kill()
                server.wait()


if __name__ == "__main__":
    main()
