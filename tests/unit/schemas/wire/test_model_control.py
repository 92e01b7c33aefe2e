"""Messages of repository control: what was packed is unpacked, and garbage is told from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage
from weir.schemas.wire.model_control import DesiredModel, DrainMessage, RegisteredFolder, RepositoryView, WantedModel

ENTRY = DesiredModel("m", 7, WantedModel(True, "{}", {"1/model.py": "m.7.0"}), WantedModel(True), False)


def test_messages_survive_packing() -> None:
    assert DesiredModel.unpack(ENTRY.pack()) == ENTRY
    assert ENTRY.objects() == {"m.7.0"}
    assert DrainMessage.unpack(DrainMessage.of("w", "m", {2, 1}).pack()) == DrainMessage("w", "m", [1, 2])
    view = RepositoryView("w", {"m": "", "n": "why"})
    assert RepositoryView.unpack(view.pack()) == view


def _with(**fields: Any) -> list[Any]:
    plain = {"name": "m", "revision": 7, "wanted": {"load": True, "config": None, "files": {}}, "fallback": None}
    return [WIRE_VERSION, {**plain, "explicit": True, **fields}]


@pytest.mark.parametrize(
    "value",
    [
        _with(name=3),
        _with(revision="7"),
        _with(revision=0),
        _with(revision=1 << 63),
        _with(wanted=None),
        _with(wanted={"load": 1}),
        _with(wanted={"load": True, "config": 5}),
        _with(wanted={"load": True, "files": {"a": 1}}),
        _with(fallback={"load": True, "nope": 1}),
        _with(explicit=None),
        _with(more=1),
        [WIRE_VERSION + 1, {}],
        [WIRE_VERSION, []],
        7,
    ],
)
def test_malformed_desired_models(value: Any) -> None:
    with pytest.raises(MalformedMessage):
        DesiredModel.unpack(msgpack.packb(value))


@pytest.mark.parametrize("unpack", [DesiredModel.unpack, DrainMessage.unpack, RepositoryView.unpack])
@given(
    data=st.binary(max_size=40)
    | st.recursive(st.none() | st.integers(0, 9) | st.text(max_size=3), st.lists).map(msgpack.packb)
)
def test_random_bytes_are_malformed(unpack: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(data)


def test_a_registered_folder_is_sent_only_where_there_is_one() -> None:
    folder = RegisteredFolder("/models/a", "/models", "alias")
    wanted = WantedModel(True, registered=folder)
    assert (wanted.source, wanted.is_override) == (folder, True)
    entry = DesiredModel("m", 3, wanted, WantedModel(True))
    assert DesiredModel.unpack(entry.pack()) == entry
    plain = DesiredModel("m", 3, WantedModel(True))
    assert (plain.wanted.source, plain.wanted.is_override) == (None, False)
    assert b"registered" not in plain.pack()
    assert b"drops_override" not in plain.pack()


def test_a_load_that_replaces_nothing_keeps_unchanged_models_unless_it_says_otherwise() -> None:
    assert WantedModel(True).keeps_unchanged
    assert not WantedModel(True, drops_override=True).keeps_unchanged
    assert not WantedModel(True, "{}").keeps_unchanged
    assert not WantedModel(False).keeps_unchanged
