"""`ImplicitStates`: a request only gets the state that the requests before it have left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weir.bus.kv.sequence_states import PIECE_BYTES, SequenceStates
from weir.bus.links.framing import Outgoing
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.core.requests import SEQUENCE_END, InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.batches import NO_REPLY, BatchEntry, BatchMessage, CheckpointName, SequencePosition
from weir.schemas.wire.codec import MalformedMessage, encode
from weir.schemas.wire.transfers import NOT_RESUMABLE, StatePiece, pack_pieces, pack_state, unpack_state
from weir.worker.backend_api.interface import Result
from weir.worker.execution.sequences import ImplicitStates, StateDeclarations


def declared(folder: Path, every: int = 0, **state: Any) -> StateDeclarations:
    given = {"input_name": "IN", "output_name": "OUT", "data_type": "TYPE_INT8", "dims": [-1], **state}
    parameters = {"weir_checkpoint_every": {"string_value": str(every)}} if every else {}
    config = {"name": "m", "max_batch_size": 4, "sequence_batching": {"state": [given]}, "parameters": parameters}
    return StateDeclarations(ModelConfig.model_validate(config), folder)


class Instance:
    """An instance that runs entries and returns the states that they got."""

    def __init__(self, states: StateDeclarations, checkpoints: SequenceStates | None = None) -> None:
        self.states = ImplicitStates(states, checkpoints)

    def run(self, *entries: BatchEntry, leaves: bytes = b"", error: WeirError | None = None) -> list[bytes | None]:
        """The state of each entry, None if it was rejected; entries that run leave `leaves` or fail with `error`."""
        places = [entry.position for entry in entries if entry.position is not None]
        names = [CheckpointName(place.run, "s", place.run, 0) for place in places]
        batch = BatchMessage("s", 1, "m", 1, 0, list(entries), checkpoints=names)
        requests = [InferRequest("m") for _ in entries]
        refused = self.states.add_to(batch, entries, requests)
        kept = [entry for entry, why in zip(entries, refused, strict=True) if why is None]
        left = [Tensor("OUT", "INT8", [1, len(leaves)], leaves)]
        outcomes: list[Result | None] = [Result(error=error, states=() if error else left) for _ in kept]
        self.messages: list[Outgoing] = self.states.keep(batch, kept, outcomes)
        assert all(why is None or why.code is ErrorCode.UNAVAILABLE for why in refused)
        return [
            None if why else bytes(request.inputs[0].data)  # type: ignore[arg-type]
            for request, why in zip(requests, refused, strict=True)
        ]


def entry(
    slot: int, number: int, run: int = 1, gateway: str = "g", restore: bool = False, flags: int = 0
) -> BatchEntry:
    return BatchEntry(gateway, 1, 0, b"", 0, SequencePosition(slot, number, restore, run, flags))


NULL = BatchEntry(NO_REPLY, 0, 0, b"")


def test_a_state_is_passed_to_the_next_request(tmp_path: Path) -> None:
    instance = Instance(declared(tmp_path))
    assert instance.run(entry(0, 0), leaves=b"ab") == [b"\0"]
    assert instance.run(NULL, entry(1, 0, run=2), leaves=b"cd") == [b"\0", b"\0"]
    assert instance.run(entry(0, 1), entry(1, 1, run=2), leaves=b"ef") == [b"ab", b"cd"]
    assert instance.run(NULL, entry(1, 2, run=2), leaves=b"gh") == [b"ef", b"ef"]
    assert instance.run(entry(0, 2)) == [b"ef"]


def test_a_request_that_does_not_continue_the_run_is_rejected(tmp_path: Path) -> None:
    instance = Instance(declared(tmp_path))
    instance.run(entry(0, 0), leaves=b"ab")
    assert instance.run(entry(0, 2)) == instance.run(entry(0, 1, run=2)) == instance.run(entry(1, 1)) == [None]
    assert instance.run(entry(0, 1, restore=True)) == [None]
    assert instance.run(entry(0, 1)) == [None], "whatever was there is not what was to be restored"


def test_a_failure_keeps_the_state_and_a_failed_repetition_drops_it(tmp_path: Path) -> None:
    instance = Instance(declared(tmp_path))
    instance.run(entry(0, 0), leaves=b"ab")
    instance.run(entry(0, 1), error=internal("no"))
    assert instance.run(entry(0, 2), leaves=b"c") == [b"ab"]
    instance.run(entry(0, 3, gateway=NO_REPLY), error=internal("no"))
    assert instance.run(entry(0, 4)) == [None]


def test_a_request_that_does_not_run_keeps_the_state(tmp_path: Path) -> None:
    instance = Instance(declared(tmp_path))
    batch = BatchMessage("s", 1, "m", 1, 0, [])
    instance.run(entry(0, 0), leaves=b"ab")
    instance.states.pass_over(batch, [entry(0, 1), entry(1, 0, run=2), entry(2, 3, run=3), NULL])
    assert instance.run(entry(0, 2), entry(1, 1, run=2), leaves=b"c") == [b"ab", b"\0"]
    assert instance.run(entry(2, 4, run=3)) == [None], "its state was not there before"
    instance.states.pass_over(batch, [entry(0, 3, gateway=NO_REPLY)])
    assert instance.run(entry(0, 4)) == [None], "what made the state did not run again"


def test_initial_values(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "f").write_bytes(b"xyz")
    first = {"name": "f", "data_type": "TYPE_INT8", "dims": [3], "data_file": "f"}
    assert Instance(declared(tmp_path, initial_state=[first])).run(entry(0, 0)) == [b"xyz"]
    with pytest.raises(
        WeirError, match="initial_state setting expects 4 bytes, but the data provided from f only has 3"
    ):
        declared(tmp_path, initial_state=[{**first, "dims": [4]}])
    with pytest.raises(WeirError, match="failed to read initial state file 'g'"):
        declared(tmp_path, initial_state=[{**first, "data_file": "g"}])


def test_messages() -> None:
    state = pack_state([Tensor("A", "FP32", [1, 2], bytes(8)), Tensor("B", "BYTES", [1], b"\1\0\0\0x")])
    pieces = [StatePiece.unpack(data) for data in pack_pieces(7, state, 10)]
    assert [(piece.number, piece.pieces) for piece in pieces] == [(7, len(pieces))] * len(pieces)
    tensors = unpack_state(b"".join(piece.content for piece in pieces))
    assert [(tensor.name, tensor.shape, tensor.data) for tensor in tensors] == [
        ("A", [1, 2], bytes(8)),
        ("B", [1], b"\1\0\0\0x"),
    ]
    for data in (
        b"",
        b"\xc1",
        encode([1, 2]),
        encode([1, "2", 1, b""]),
        encode([1, 2, 0, b""]),
        encode([1, 2, 1, "x"]),
    ):
        with pytest.raises(MalformedMessage):
            StatePiece.unpack(data)
    for data in (b"", b"\xc1", encode(1), encode([1]), encode([["A", "FP32", [1], ["s", 0, 0, 0, 1]]])):
        with pytest.raises(MalformedMessage):
            unpack_state(data)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


async def test_a_sequence_continues_on_another_worker_from_a_checkpoint(nats: EmbeddedNats, tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        checkpoints = SequenceStates(bus)
        await asyncio.to_thread(checkpoints.prepare)
        large = bytes(range(256)) * (PIECE_BYTES // 100)
        states = declared(tmp_path, every=2)
        first, second = Instance(states, checkpoints), Instance(states, checkpoints)

        async def run(instance: Instance, *entries: BatchEntry, **left: Any) -> list[bytes | None]:
            found = await asyncio.to_thread(instance.run, *entries, **left)
            for subject, data in instance.messages:
                bus.publish(subject, data)
            await bus.flush()
            return found

        await run(first, entry(0, 0), entry(1, 0, run=2), leaves=b"a")
        stored = [(subject.rsplit(".", 2)[1], StatePiece.unpack(data)) for subject, data in first.messages]
        assert stored == [("r1", StatePiece(1, 1, b"", "g", 1))] * 2, "the requests, for another scheduler"
        await run(first, entry(0, 1), entry(1, 1, run=2), leaves=large)
        await run(first, entry(0, 2), leaves=b"c")
        await run(first, entry(0, 3), leaves=b"d")
        # The checkpoint before the last is there too, for who has not heard of the last.
        both = (entry(5, 2, restore=True), entry(6, 2, run=2, restore=True))
        assert await run(second, *both, leaves=b"x") == [large, large]
        assert await run(second, entry(5, 4, restore=True), entry(6, 3, run=2), leaves=b"x") == [b"d", b"x"]
        assert await run(second, entry(5, 6, restore=True), entry(6, 4, run=3, restore=True)) == [None, None]
        # One that failed must not run again, and one that has ended is kept no longer.
        await run(first, entry(0, 4), error=internal("no"))
        assert {StatePiece.unpack(data).number for _, data in first.messages} == {NOT_RESUMABLE}
        assert await run(second, entry(5, 4, restore=True)) == [None]
        for instance, run_number in ((first, 1), (second, 2)):
            place = entry(0, 0, run=run_number, flags=SEQUENCE_END)
            await run(instance, place, leaves=b"z")
        while (await bus.jetstream.stream_info("KV_sequence-states")).state.messages:
            await asyncio.sleep(0.01)
        await bus.close()
