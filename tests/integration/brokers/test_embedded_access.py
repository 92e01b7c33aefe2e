"""The nats-server of `weir serve` accepts only clients with its password, which no other user can read."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from pathlib import Path
from urllib.parse import urlsplit

import nats
import psutil
import pytest
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from tests.support.clients.producers import int64_body, value_of
from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Serve
from weir.commands.app import main


def shown_of(process: psutil.Process) -> str:
    """What other processes can see of a process: its command line, and its environment as it was started."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return f"{process.cmdline()} {process.environ()}"
    return ""


async def ask(url: str, value: int) -> int:
    client = await nats.connect(url)
    try:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(NoRespondersError):  # the gateway is not connected again yet
                    return int(value_of((await client.request("infer.fast", int64_body(value), timeout=20)).data))
                await asyncio.sleep(0.02)
    finally:
        await client.close()


async def is_refused(url: str) -> bool:
    with pytest.raises(NatsError, match="Authorization Violation"):
        await nats.connect(url, allow_reconnect=False)
    return True


def test_the_password_is_in_one_private_file_and_in_nothing_that_is_shown(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_identity(tmp_path / "models", "fast", "INT64")
    data = tmp_path / "data"
    server = serve(tmp_path / "models", f"--data-dir={data}")
    url = urlsplit(server.nats_url)
    assert url.username == "weir"
    assert url.password
    file = data / "nats-url"
    assert file.read_text() == f"{server.nats_url}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    assert asyncio.run(ask(server.nats_url, 4)) == 4
    assert asyncio.run(is_refused(f"nats://{url.hostname}:{url.port}"))
    assert asyncio.run(is_refused(f"nats://weir:wrong@{url.hostname}:{url.port}"))

    # Commands of the same user find it.
    with pytest.raises(SystemExit) as ended:
        main(["dead", "list", f"--data-dir={data}"])
    assert ended.value.code == 0, capsys.readouterr()

    texts = [shown_of(process) for process in server.processes()]
    texts += [path.read_text(errors="replace") for path in data.glob("*.log")]
    texts += [server.printed(), server.log(), (data / "addresses.json").read_text()]
    assert len([text for text in texts if text]) >= 8
    assert not [text for text in texts if url.password in text]
    for path in data.iterdir():
        if path.is_file() and url.password in path.read_text(errors="replace"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    server.kill("nats")
    server.wait_ready("fast")
    assert asyncio.run(ask(server.nats_url, 5)) == 5, "the password stays that of the folder"
