"""Payloads are fetched on connections between processes, and through the broker where that fails."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from tests.support.payload_pairs import LOCALLY, Pair, pair, run
from tests.support.raw_links import RawEnd
from weir.bus.links import tcp
from weir.bus.links.framing import pack_frames
from weir.bus.links.handshake import new_secret
from weir.bus.links.tcp import TcpListener
from weir.bus.nats import remote_links
from weir.bus.nats.access import NO_ACCESS, BrokerAccess, BrokerRefused
from weir.bus.nats.remote_links import make_listener
from weir.bus.payloads import owner_links
from weir.bus.payloads.fetch_plan import Loss
from weir.bus.payloads.owner_links import LINK_PIECE_BYTES
from weir.schemas.wire.transfers import OwnerAddress


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority `ca`, what it has signed, `ours`, and what it has not, `other`."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "other"):
        openssl(
            "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}"
        )
    openssl("req", *key, "-keyout", "ours.key", "-out", "ours.csr", "-subj", "/CN=a role")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl("x509", "-req", "-in", "ours.csr", "-out", "ours.pem", *signed)
    return folder


def access_of(folder: Path, name: str = "ours") -> BrokerAccess:
    return BrokerAccess(ca=str(folder / "ca.pem"), cert=str(folder / f"{name}.pem"), key=str(folder / f"{name}.key"))


@pytest.mark.parametrize("runner", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
def test_payloads_of_all_sizes_are_fetched_concurrently(
    runner: Callable[[Awaitable[None]], None], is_encrypted: bool, certificates: Path
) -> None:
    async def fetch() -> None:
        async with pair(access_of(certificates) if is_encrypted else NO_ACCESS) as both:
            await both.connected()
            by_broker, direct = both.fetcher.fetched_bytes, both.fetcher.direct_bytes
            sizes = (1, 65_537, LINK_PIECE_BYTES, 5_000_003, 2 * LINK_PIECE_BYTES, 9_999_999)
            payloads = [both.payload(size) for size in sizes]
            outcomes = await asyncio.gather(*(both.fetched(ref) for ref, _ in payloads))
            assert outcomes == [content for _, content in payloads]
            assert both.fetcher.direct_bytes - direct == sum(sizes)
            assert both.fetcher.fetched_bytes == by_broker

    runner(fetch())


def test_no_payload_waits_for_a_connection() -> None:
    async def fetch() -> None:
        async with pair(listens=False) as both:
            ref, content = both.payload(300_000)
            for _ in range(3):
                assert await both.fetched(ref) == content
            assert both.fetcher.fetched_bytes == 3 * len(content)
            assert not both.fetcher.direct_bytes

    run(fetch)


def test_cancelled_fetches_do_not_disturb_others() -> None:
    async def fetch() -> None:
        async with pair() as both:
            await both.connected()
            (large, _), (ref, content) = both.payload(9_000_000), both.payload(300_000)
            for _ in range(20):
                number = both.fetcher.fetch(large, lambda outcome: None)
                other = both.fetcher.fetch(ref, lambda outcome: None)
                await asyncio.sleep(0)
                both.fetcher.cancel(number)
                before = both.fetcher.direct_bytes
                assert await both.fetched(ref) == content
                assert both.fetcher.direct_bytes > before, "the link is not closed"
                both.fetcher.cancel(other)

    run(fetch)


def test_a_payload_that_was_freed_is_stale() -> None:
    async def fetch() -> None:
        async with pair() as both:
            await both.connected()
            slot = both.arena.allocate(100_000)
            assert slot is not None
            ref = slot.ref()
            slot.free()
            assert await both.fetched(ref) is Loss.STALE
            assert await both.fetched(ref._replace(segment="weir-gateway-01234567-1.131072")) is Loss.UNREACHABLE

    run(fetch)


def test_the_broker_brings_what_a_connection_broke_off() -> None:
    async def fetch() -> None:
        async with pair() as both:
            await both.connected()
            ref, content = both.payload(12_000_000)
            coming = asyncio.ensure_future(both.fetched(ref))
            assert both.listener is not None
            before = both.server.sent_bytes
            while both.server.sent_bytes < before + 3 * LINK_PIECE_BYTES:
                await asyncio.sleep(0)
            direct = both.fetcher.direct_bytes
            both.listener.close()
            assert await coming == content
            assert both.fetcher.direct_bytes == direct
            assert both.fetcher.fetched_bytes >= len(content)

    run(fetch)


def test_payloads_go_through_the_broker_when_no_listener_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        gone = OwnerAddress("127.0.0.1", taken.getsockname()[1], bytes(32))

        async def fetch() -> None:
            async with pair() as both:
                monkeypatch.setattr(TcpListener, "address", lambda self, host: gone)
                ref, content = both.payload(300_000)
                assert await both.fetched(ref) == content
                links = both.fetcher._links
                assert links is not None
                async with asyncio.timeout(10):
                    while len(links):
                        await asyncio.sleep(0.001)
                assert await both.fetched(ref) == content
                assert not len(links), "not at once again"

        run(fetch)


def test_a_fetch_from_a_silent_owner_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 0.05)

    async def fetch() -> None:
        silent = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
        mute = OwnerAddress("127.0.0.1", silent.sockets[0].getsockname()[1], bytes(32))
        async with pair() as both:
            monkeypatch.setattr(TcpListener, "address", lambda self, host: mute)
            ref, content = both.payload(300_000)
            assert await both.fetched(ref) == content
            links = both.fetcher._links
            assert links is not None
            async with asyncio.timeout(10):
                while len(links):
                    await asyncio.sleep(0.001)
            assert await both.fetched(ref) == content
        silent.close()

    run(fetch)


def test_certificates_of_others_are_refused(certificates: Path) -> None:
    async def fetch() -> None:
        ours, other = access_of(certificates), access_of(certificates, "other")
        async with pair(ours, reads_as=other) as both:
            await _never_connects(both)
        async with pair(ours, reads_as=NO_ACCESS) as both:
            await _never_connects(both)
        async with pair(NO_ACCESS, reads_as=ours) as both:
            await _never_connects(both)

    run(fetch)


async def _never_connects(both: Pair) -> None:
    ref, content = both.payload(100_000)
    assert await both.fetched(ref) == content
    links = both.fetcher._links
    assert links is not None
    async with asyncio.timeout(10):
        while len(links):
            await asyncio.sleep(0.001)
    assert not both.fetcher.direct_bytes


def test_the_certificate_of_another_role_is_rejected(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_links, "_renew", lambda context, access: bytes(32))

    async def fetch() -> None:
        async with pair(access_of(certificates)) as both:
            await _never_connects(both)

    run(fetch)


def test_encryption_without_a_certificate_of_our_own_is_refused(certificates: Path) -> None:
    with pytest.raises(BrokerRefused, match=r"--payload-listen: .* --nats-cert"):
        make_listener(LOCALLY, BrokerAccess(ca=str(certificates / "ca.pem")), is_encrypted=True)


@pytest.mark.parametrize(
    "frames",
    [
        [("kept", b"{piece}")],
        [("{piece}", bytes(10)), ("kept", b"{piece}")],
        [("{piece}", bytes(100_001)), ("kept", b"{piece}")],
        [("{piece}", bytes(100_000)), ("{piece}", bytes(100_000))],
        [("done.scheduler", b"x")],
        [("{piece}", bytes(LINK_PIECE_BYTES + 300))],
    ],
    ids=["no content", "short", "long", "twice", "no subject of pieces", "larger than any piece"],
)
def test_an_owner_that_violates_the_protocol_is_disconnected(
    frames: list[tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its payloads come through the broker."""
    secret = new_secret()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = RawEnd(reader, writer)
        await end.prove(secret, is_opening=False)
        piece, _ = await end.frame()
        for subject, data in frames:
            end.send(subject.replace("{piece}", piece), data.replace(b"{piece}", piece.encode()))
        assert await end.is_closed()
        writer.close()

    async def fetch() -> None:
        served = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = served.sockets[0].getsockname()[1]
        async with pair() as both:
            monkeypatch.setattr(TcpListener, "address", lambda self, host: OwnerAddress("127.0.0.1", port, secret))
            ref, content = both.payload(100_000)
            async with asyncio.timeout(20):
                links = both.fetcher._links
                assert links is not None
                assert await both.fetched(ref) == content
                while not links._links:
                    await asyncio.sleep(0.001)
            assert await both.fetched(ref) == content
            assert not links._links
            assert not both.fetcher.direct_bytes
        served.close()

    run(fetch)


def test_an_owner_that_stops_within_a_piece_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_links, "LINK_SILENCE_TIMEOUT_S", 0.1)
    secret = new_secret()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = RawEnd(reader, writer)
        await end.prove(secret, is_opening=False)
        piece, _ = await end.frame()
        writer.write(pack_frames([(piece, bytes(100_000))])[:50_000])
        assert await end.is_closed()
        writer.close()

    async def fetch() -> None:
        served = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = served.sockets[0].getsockname()[1]
        async with pair() as both:
            monkeypatch.setattr(TcpListener, "address", lambda self, host: OwnerAddress("127.0.0.1", port, secret))
            ref, content = both.payload(100_000)
            links = both.fetcher._links
            assert links is not None
            assert await both.fetched(ref) == content
            async with asyncio.timeout(20):
                while not links._links:
                    await asyncio.sleep(0.001)
            assert await both.fetched(ref) == content
            assert not both.fetcher.direct_bytes
        served.close()

    run(fetch)
