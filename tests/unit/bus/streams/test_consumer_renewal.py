"""A consumer is recreated in a cluster whose API leader may choose a dead server to lead it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from nats.errors import TimeoutError as NoAnswer
from nats.js.errors import APIError, BadRequestError

from weir.bus.streams import consumers as consumer_renewal
from weir.bus.streams.consumers import ELECTION_S, leader_of_consumer, recreate_consumer, redeliver

NOT_FOUND = {"error": {"code": 404, "err_code": 10014, "description": "consumer not found"}}
EXISTS = {"error": {"code": 400, "err_code": 10148, "description": "consumer already exists"}}
NO_META_LEADER = {"error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}
LED = {"name": "c", "cluster": {"leader": "n1"}}


class Api:
    """A bus and its JetStream, which gives these responses in order; None for none. `asked` are the verbs."""

    is_clustered = True

    def __init__(self, *answers: Mapping[str, Any] | None) -> None:
        self.jetstream = self
        self._answers = list(answers)
        self.asked: list[str] = []
        self.waited_s: list[float | None] = []

    async def ask(self, operation: str, question: Any = None, once_s: float | None = None) -> Mapping[str, Any]:
        self.asked.append(operation.split(".")[1])
        self.waited_s.append(once_s)
        answer = self._answers.pop(0)
        if answer is None:
            raise NoAnswer
        if "error" in answer:
            raise APIError.from_error(answer["error"])
        return answer


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_renewal, "_WAIT_S", 0.0)


async def anew(api: Api) -> str:
    return await recreate_consumer(api, "S", {"name": "c"})  # type: ignore[arg-type]


async def test_a_new_consumer_without_a_leader_is_created_again() -> None:
    # The delete of a consumer that nobody leads has no answer, and has been done.
    api = Api({"success": True}, None, None, NOT_FOUND, None, NOT_FOUND, LED)
    assert await anew(api) == "n1"
    assert api.asked == ["DELETE", "CREATE", "DELETE", "DELETE", "CREATE", "DELETE", "CREATE"]
    waited_s = [waited or 0.0 for verb, waited in zip(api.asked, api.waited_s, strict=True) if verb == "CREATE"]
    assert 0 < waited_s[0] < waited_s[1] < waited_s[2], "each is waited for longer than the one before"


async def test_the_last_try_waits_for_an_election() -> None:
    api = Api(*[{"success": True}, None] * 3, {"success": True}, LED)
    assert await anew(api) == "n1"
    assert api.waited_s[-1] == ELECTION_S


async def test_nothing_is_created_before_the_deletion_is_confirmed() -> None:
    api = Api(None, NO_META_LEADER, NO_META_LEADER, {"success": True}, LED)
    assert await anew(api) == "n1"
    assert api.asked == ["DELETE"] * 4 + ["CREATE"]


async def test_a_rejection_is_raised() -> None:
    with pytest.raises(BadRequestError):
        await anew(Api(NOT_FOUND, EXISTS))


async def test_requests_to_one_server_are_not_repeated() -> None:
    api = Api({"success": True}, None)
    api.is_clustered = False
    with pytest.raises(NoAnswer):
        await anew(api)
    assert api.waited_s == [None, None]


async def test_tries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_renewal, "RETRY_FOR_S", 0.0)
    with pytest.raises(NoAnswer):
        await anew(Api(NOT_FOUND, None))


async def test_the_leader_of_a_consumer_is_requested_once() -> None:
    assert await leader_of_consumer(Api(LED), "S", "c") == "n1"  # type: ignore[arg-type]
    for answer in (None, NOT_FOUND, {"name": "c"}):
        assert await leader_of_consumer(Api(answer), "S", "c") == ""  # type: ignore[arg-type]


async def again(*answers: Mapping[str, Any] | None) -> tuple[str, list[str]]:
    api = Api(*answers)
    return await redeliver(api, "S", "c", "7"), api.asked  # type: ignore[arg-type]


async def test_a_consumer_with_a_leader_redelivers_without_being_recreated() -> None:
    ours = {**LED, "config": {"priority_groups": ["7"]}}
    assert await again(ours, {"reset_seq": 1}) == ("n1", ["INFO", "RESET"])
    # Its leader is being chosen.
    assert await again(None, NO_META_LEADER, ours, {"reset_seq": 1}) == ("n1", ["INFO", "INFO", "INFO", "RESET"])


async def test_a_consumer_that_can_not_redeliver_must_be_recreated() -> None:
    ours = {**LED, "config": {"priority_groups": ["7"]}}
    assert await again(NOT_FOUND) == ("", ["INFO"])
    assert await again({**LED, "config": {"priority_groups": ["8"]}}) == ("", ["INFO"])
    assert await again(ours, {"error": {"code": 400, "description": "bad request"}}) == ("", ["INFO", "RESET"])
    # An older server, or one that does not let us, says nothing.
    assert await again(ours, None, ours, None) == ("", ["INFO", "RESET"] * 2)


async def test_a_redelivery_is_prepared_with_what_was_delivered() -> None:
    ours = {**LED, "config": {"priority_groups": ["7"]}, "delivered": {"stream_seq": 5}}
    api, prepared = Api(ours, {"reset_seq": 1}), list[Mapping[str, Any]]()

    async def prepare(info: Mapping[str, Any]) -> None:
        assert api.asked == ["INFO"]
        prepared.append(info)

    assert await redeliver(api, "S", "c", "7", prepare) == "n1"  # type: ignore[arg-type]
    assert (prepared, api.asked) == ([ours], ["INFO", "RESET"])
