"""Payloads are fetched on links between processes, which are opened again once; what fails then is a loss."""

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
from weir.bus.payloads import fetcher as fetching
from weir.bus.payloads.fetch_plan import MAX_OUTSTANDING, PIECE_BYTES, Loss
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
            sizes = (1, 65_537, PIECE_BYTES, 5_000_003, 2 * PIECE_BYTES, 9_999_999)
            payloads = [both.payload(size) for size in sizes]
            outcomes = await asyncio.gather(*(both.fetched(ref) for ref, _ in payloads))
            assert outcomes == [content for _, content in payloads]
            assert both.fetcher.fetched_bytes == sum(sizes)
            assert len(both.fetcher) == 1, "one link for all"

    runner(fetch())


def test_payloads_of_a_process_without_an_address_can_t_be_fetched() -> None:
    async def fetch() -> None:
        async with pair(listens=False) as both:
            ref, _ = both.payload(300_000)
            for _ in range(3):
                assert await both.fetched(ref) is Loss.NO_ADDRESS
            assert both.fetcher.lost == 3
            assert not len(both.fetcher)

    run(fetch)


def test_an_empty_payload_needs_no_link() -> None:
    async def fetch() -> None:
        async with pair(listens=False) as both:
            ref, _ = both.payload(300_000)
            assert await both.fetched(ref._replace(size=0)) == b""

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
                assert await both.fetched(ref) == content
                both.fetcher.cancel(other)
            assert both.listener is not None
            assert len(both.listener._accepted) == 1, "the link was not closed"

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


@pytest.mark.parametrize("cuts", [1, 2])
def test_a_fetch_goes_on_at_its_offset_on_a_second_link_and_on_no_third(cuts: int) -> None:
    async def fetch() -> None:
        async with pair() as both:
            await both.connected()
            ref, content = both.payload(12_000_000)
            begun_bytes = both.server.sent_bytes
            coming = asyncio.ensure_future(both.fetched(ref))
            for _ in range(cuts):
                before = both.server.sent_bytes
                while both.server.sent_bytes < before + 2 * PIECE_BYTES:
                    await asyncio.sleep(0)
                assert both.listener is not None
                for link in list(both.listener._accepted):
                    link.break_off()
            if cuts == 2:
                assert await coming is Loss.UNREACHABLE
            else:
                assert await coming == content
                assert both.server.sent_bytes - begun_bytes < 12_000_000 + MAX_OUTSTANDING * PIECE_BYTES
            assert await both.fetched(ref) == content, "the next one has a link again"

    run(fetch)


def test_a_process_that_has_ended_is_unreachable() -> None:
    async def fetch() -> None:
        async with pair() as both:
            await both.connected()
            ref, _ = both.payload(12_000_000)
            coming = asyncio.ensure_future(both.fetched(ref))
            assert both.listener is not None
            before = both.server.sent_bytes
            while both.server.sent_bytes < before + 2 * PIECE_BYTES:
                await asyncio.sleep(0)
            both.fetcher.bus._callbacks.clear()  # type: ignore[attr-defined]
            await both.fetcher.replies.start()
            both.listener.close()
            assert await coming is Loss.UNREACHABLE
            assert not len(both.fetcher)

    run(fetch)


def test_an_address_where_no_one_listens_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        gone = OwnerAddress("127.0.0.1", taken.getsockname()[1], bytes(32))

        async def fetch() -> None:
            async with pair() as both:
                monkeypatch.setattr(TcpListener, "address", lambda self, host: gone)
                ref, content = both.payload(300_000)
                assert await both.fetched(ref) is Loss.UNREACHABLE
                monkeypatch.undo()
                assert await both.fetched(ref) == content

        run(fetch)


def test_a_fetch_from_a_silent_owner_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 0.05)

    async def fetch() -> None:
        silent = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
        mute = OwnerAddress("127.0.0.1", silent.sockets[0].getsockname()[1], bytes(32))
        async with pair() as both:
            monkeypatch.setattr(TcpListener, "address", lambda self, host: mute)
            ref, _ = both.payload(300_000)
            assert await both.fetched(ref) is Loss.UNREACHABLE
        silent.close()

    run(fetch)


def test_a_broker_that_is_away_costs_no_fetch() -> None:
    async def fetch() -> None:
        async with pair() as both:
            both.fetcher.bus.is_connected = False  # type: ignore[misc]
            ref, content = both.payload(300_000)
            coming = asyncio.ensure_future(both.fetched(ref))
            await asyncio.sleep(0)
            both.fetcher.bus.is_connected = True  # type: ignore[misc]
            assert await coming == content

    run(fetch)


def test_beyond_the_most_links_an_idle_one_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_TCP_LINKS_OPENED", 1)

    async def fetch() -> None:
        async with pair() as both:
            ref, content = both.payload(300_000)
            assert await both.fetched(ref) == content
            elsewhere = ref._replace(segment="weir-gateway-01234567-1.131072")
            assert await both.fetched(elsewhere) is Loss.UNREACHABLE, "nobody has that name"
            large, _ = both.payload(9_000_000)
            both.fetcher.fetch(large, lambda outcome: None)
            assert await both.fetched(elsewhere) is Loss.UNREACHABLE
            assert await both.fetched(ref) == content

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
    ref, _ = both.payload(100_000)
    assert await both.fetched(ref) is Loss.UNREACHABLE
    assert not len(both.fetcher)


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
        [("{piece}", bytes(PIECE_BYTES + 300))],
    ],
    ids=["no content", "short", "long", "twice", "no subject of pieces", "larger than any piece"],
)
def test_an_owner_that_violates_the_protocol_is_disconnected(
    frames: list[tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both links."""
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
            ref, _ = both.payload(100_000)
            assert await both.fetched(ref) is Loss.UNREACHABLE
        served.close()

    run(fetch)


def test_an_owner_that_stops_within_a_piece_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "LINK_SILENCE_TIMEOUT_S", 0.1)
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
            ref, _ = both.payload(100_000)
            assert await both.fetched(ref) is Loss.UNREACHABLE
        served.close()

    run(fetch)
