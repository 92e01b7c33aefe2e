"""Answers that are posted to URLs: to a real HTTP server, through a real stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from tests.support.clients.nats_flush import flush
from tests.support.gateway.async_frontend import Door, document, run
from weir.bus.naming import durable_subjects as subjects
from weir.durable.api import callbacks, receivers


class Receiver:
    """An HTTP server that keeps what is posted to it, and answers with the statuses it is told, then with 204."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.heard: asyncio.Queue[tuple[str, dict[str, str], bytes]] = asyncio.Queue()
        self.port = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start, *rows = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (row.partition(": ") for row in rows if row)}
        body = await reader.readexactly(int(headers["content-length"]))
        writer.write(self._answers.pop(0) if self._answers else b"HTTP/1.1 204 No Content\r\n\r\n")
        self.heard.put_nowait((start, headers, body))
        writer.close()


def free_receiver(*answers: bytes) -> Receiver:
    receiver = Receiver(*answers)

    async def find_port() -> None:
        async with receiver.listening():
            pass

    asyncio.run(find_port())
    return receiver


def posted(nats_url: str, receiver: Receiver, scenario: Callable[[Door, str], object]) -> None:
    async def within(door: Door) -> None:
        async with receiver.listening():
            await scenario(door, f"http://127.0.0.1:{receiver.port}/hooks/a?b=c")  # type: ignore[misc]

    run(nats_url, within, callback_allow=(f"http://127.0.0.1:{receiver.port}/hooks/",))


def test_an_answer_is_posted_until_it_is_taken(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "FIRST_DELAY_S", 0.05)
    receiver = free_receiver(
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 503 Not Now\r\n\r\n", b"no HTTP at all\r\n"
    )

    async def scenario(door: Door, url: str) -> None:
        id = await door.accepted(document(1, 2), Weir_Callback_Url=url)
        heard = [await asyncio.wait_for(receiver.heard.get(), 10) for _ in range(3)]
        start, headers, body = heard[-1]
        assert start == "POST /hooks/a?b=c HTTP/1.1"
        assert (headers["host"], headers["weir-id"]) == (f"127.0.0.1:{receiver.port}", id)
        assert (headers["weir-outcome"], headers["content-type"]) == ("succeeded", "application/json")
        result = await door.ask("GET", f"/v2/jobs/{id}/result")
        assert {kept[2] for kept in heard} == {body} == {result.body}
        await nothing_left(door)
        assert door.callbacks.posted == 1

    posted(nats_url, receiver, scenario)


def test_what_is_refused_for_good_is_given_up_and_redirects_are_not_followed(nats_url: str) -> None:
    receiver = free_receiver(b"HTTP/1.1 400 No\r\n\r\n", b"HTTP/1.1 302 There\r\nLocation: /elsewhere\r\n\r\n")

    async def scenario(door: Door, url: str) -> None:
        for _ in range(2):
            await door.accepted(document(1), Weir_Callback_Url=url)
        await nothing_left(door, given_up=2)
        assert receiver.heard.qsize() == 2

    posted(nats_url, receiver, scenario)


def test_what_others_publish_there_is_posted_only_where_that_is_allowed(nats_url: str) -> None:
    receiver = free_receiver()

    async def scenario(door: Door, url: str) -> None:
        for subject in (subjects.callback("x", url.replace("hooks", "admin")), "callback.x", "callback.x.%%%"):
            await door.client.publish(subject, b"{}")
        await nothing_left(door, given_up=3)
        assert receiver.heard.empty()
        refused = await door.infer(document(1), Weir_Callback_Url=url.replace("hooks", "admin"))
        assert (refused.status, "not allowed" in refused.document["error"]) == (400, True)

    posted(nats_url, receiver, scenario)


def test_large_answers_are_posted_whole(nats_url: str) -> None:
    receiver = free_receiver()

    async def scenario(door: Door, url: str) -> None:
        door.intake.large = True
        id = await door.accepted(document(*range(9)), Weir_Callback_Url=url)
        _, headers, body = await asyncio.wait_for(receiver.heard.get(), 10)
        assert "weir-object" not in headers
        assert body == (await door.ask("GET", f"/v2/jobs/{id}/result")).body

    posted(nats_url, receiver, scenario)


def test_what_only_waits_for_other_posts_to_its_receiver_has_not_been_tried(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "MAX_POSTS_TO_ONE", 1)
    monkeypatch.setattr(callbacks, "MAX_TRIES", 2)
    monkeypatch.setattr(callbacks, "FIRST_DELAY_S", 0.01)
    slow, go_on = free_receiver(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go_on.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async def within(door: Door) -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", slow.port):
            for _ in range(2):
                await door.accepted(document(1), Weir_Callback_Url=f"http://127.0.0.1:{slow.port}/hooks/a")
            while max(door.callbacks._waits.values(), default=0) < 4:
                await asyncio.sleep(0.01)
            go_on.set()
            await nothing_left(door)
            assert (door.callbacks.posted, door.callbacks.dropped) == (2, 0)

    run(nats_url, within, callback_allow=(f"http://127.0.0.1:{slow.port}/hooks/",))


def test_a_receiver_that_hangs_leaves_places_for_others(nats_url: str) -> None:
    hangs, other = free_receiver(), free_receiver()

    async def hang(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def within(door: Door) -> None:
        server = await asyncio.start_server(hang, "127.0.0.1", hangs.port)
        async with other.listening():
            for number in range(2 * callbacks.MAX_POSTS):
                url = f"http://127.0.0.1:{hangs.port}/hooks/{number}"
                await door.accepted(document(1), Weir_Callback_Url=url)
            id = await door.accepted(document(2), Weir_Callback_Url=f"http://127.0.0.1:{other.port}/hooks/b")
            _, headers, _ = await asyncio.wait_for(other.heard.get(), callbacks.POST_TIMEOUT_S - 5)
            assert headers["weir-id"] == id
            assert not door.callbacks.dropped
        server.close()

    run(nats_url, within, callback_allow=tuple(f"http://127.0.0.1:{one.port}/hooks/" for one in (hangs, other)))


def test_a_callback_subject_is_a_reply_subject(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        answers = await door.client.subscribe("answers.mine")
        await flush(door.client)
        await door.accepted(document(1), Weir_Callback_Subject="answers.mine")
        assert (await answers.next_msg(5)).headers["Weir-Outcome"] == "succeeded"
        both = await door.infer(document(1), Weir_Callback_Subject="answers.a", Weir_Callback_Url="http://x/")
        assert both.status == 400

    run(nats_url, scenario)


async def nothing_left(door: Door, given_up: int = 0) -> None:
    while door.callbacks.dropped < given_up or (await callbacks_left(door)):
        await asyncio.sleep(0.02)


async def callbacks_left(door: Door) -> int:
    return int((await door.client.jetstream().stream_info(subjects.CALLBACK_STREAM)).state.messages)
