"""`Bus.connect` where there is no broker: one error that says so."""

import asyncio
import socket

import pytest

from bus.connection import Bus


async def test_no_server_is_one_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        async with asyncio.TaskGroup() as background:
            with pytest.raises(OSError, match=f"no NATS server answers at {url}"):
                await Bus.connect(url, "nobody", background, connect_timeout_s=0.2)
