"""Both ends of a link between hosts prove that they know the secret, and have the same version."""

from __future__ import annotations

import pytest

from weir.bus.links import handshake
from weir.bus.links.handshake import Handshake, HandshakeError, new_secret

SECRET = new_secret()


def ends(opening: bytes = SECRET, listening: bytes = SECRET) -> tuple[Handshake, Handshake]:
    return Handshake(opening, is_opening=True), Handshake(listening, is_opening=False)


def test_both_ends_are_proven_after_three_messages() -> None:
    opening, listening = ends()
    proof = opening.receive(listening.receive(opening.begin()))
    assert opening.is_proven
    assert not listening.is_proven
    assert listening.receive(proof) == b""
    assert listening.is_proven


def test_an_end_without_the_secret_is_rejected_by_the_opening_end_before_it_sends_a_proof() -> None:
    opening, listening = ends(listening=bytes(32))
    with pytest.raises(HandshakeError, match="does not prove"):
        opening.receive(listening.receive(opening.begin()))
    assert not opening.is_proven


def test_a_proof_can_t_be_sent_back() -> None:
    opening, listening = ends()
    response = listening.receive(opening.begin())
    with pytest.raises(HandshakeError, match="does not prove"):
        listening.receive(response[-handshake.PROOF_BYTES :])
    assert not listening.is_proven


def test_a_recorded_handshake_can_t_be_repeated() -> None:
    opening, listening = ends()
    begin = opening.begin()
    proof = opening.receive(listening.receive(begin))
    again = Handshake(SECRET, is_opening=False)
    again.receive(begin)
    with pytest.raises(HandshakeError, match="does not prove"):
        again.receive(proof)


@pytest.mark.parametrize("versions", [(1, 2), (2, 1)])
def test_ends_with_versions_one_apart_use_the_lower(versions: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    opening, listening = ends()
    opening.version = versions[0]
    begin = opening.begin()
    monkeypatch.setattr(handshake, "VERSION", versions[1])
    response = listening.receive(begin)
    monkeypatch.setattr(handshake, "VERSION", versions[0])
    assert listening.receive(opening.receive(response)) == b""
    assert opening.is_proven
    assert listening.is_proven
    assert opening.version == listening.version == 1


def test_an_end_that_is_too_old_is_rejected_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, listening = ends()
    begin = opening.begin()
    response = listening.receive(begin)
    monkeypatch.setattr(handshake, "VERSION", 3)
    monkeypatch.setattr(handshake, "OLDEST_VERSION", 2)
    for end, message in ((Handshake(SECRET, is_opening=False), begin), (opening, response)):
        with pytest.raises(HandshakeError, match="has version 1 of links, this process versions 2 to 3"):
            end.receive(message)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"weir link", b"weir link\x01" + bytes(15)])
def test_what_is_no_handshake_is_rejected(data: bytes) -> None:
    for end in ends():
        with pytest.raises(HandshakeError, match="does not begin as a link does"):
            end.receive(data)
