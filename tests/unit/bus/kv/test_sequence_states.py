"""Checkpoints and caches in a broker without room for them."""

from __future__ import annotations

from typing import Any, cast

import pytest
from nats.js.errors import NotFoundError, ServerError

from weir.bus.kv.sequence_states import SequenceStates
from weir.bus.streams import declarations as streams
from weir.schemas.core.errors import ErrorCode, WeirError


class FullBroker:
    """A bus, and its JetStream: there is nothing, and nothing can be made."""

    def __init__(self) -> None:
        self.jetstream = self
        self.recoveries: list[Any] = []

    replicas = 1

    def on_reconnect(self, listener: Any) -> None:
        self.recoveries.append(listener)

    async def stream_info(self, _name: str) -> None:
        raise NotFoundError

    async def add_stream(self, _config: object) -> None:
        raise ServerError(500, "insufficient memory resources available")

    create_key_value = add_stream

    async def find_stream(self, _name: str) -> None:
        pass


async def test_a_full_broker_is_an_error() -> None:
    broker = cast(Any, FullBroker())
    for made in (streams.ensure_response_cache(broker, 1 << 20, 0), streams.ensure_states_bucket(broker)):
        with pytest.raises(WeirError, match="no room for") as raised:
            await made
        assert raised.value.code is ErrorCode.UNAVAILABLE


async def test_a_worker_recovers_without_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    broker = FullBroker()
    states = SequenceStates(cast(Any, broker))
    (recover,) = broker.recoveries
    await recover()
    assert caplog.text == ""
    states._is_needed = True
    await recover()
    assert "states of sequences are not checkpointed" in caplog.text
