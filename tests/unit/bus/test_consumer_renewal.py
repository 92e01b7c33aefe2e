"""A consumer is made anew in a cluster whose server that leads the API draws one that has gone to lead it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from nats.errors import TimeoutError as NoAnswer
from nats.js.errors import BadRequestError

from bus import consumer_renewal
from bus.consumer_renewal import ELECTION_S, deliver_again, leader_of_consumer, make_anew

NOT_FOUND = {"error": {"code": 404, "err_code": 10014, "description": "consumer not found"}}
EXISTS = {"error": {"code": 400, "err_code": 10148, "description": "consumer already exists"}}
NO_META_LEADER = {"error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}
LED = {"name": "c", "cluster": {"leader": "n1"}}


class Api:
    """Answers as it was told to, in that order; None for no answer. `asked` are the verbs."""

    is_clustered = True

    def __init__(self, *answers: Mapping[str, Any] | None) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []
        self.waited_s: list[float | None] = []

    async def ask(self, subject: str, question: Any = None, once_s: float | None = None) -> Mapping[str, Any]:
        self.asked.append(subject.split(".")[3])
        self.waited_s.append(once_s)
        answer = self._answers.pop(0)
        if answer is None:
            raise NoAnswer
        return answer


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_renewal, "_WAIT_S", 0.0)


async def anew(api: Api) -> str:
    return await make_anew(api, "S", {"name": "c"})  # type: ignore[arg-type]


async def test_another_is_asked_for_where_nobody_leads_the_new_one() -> None:
    # The delete of a consumer that nobody leads has no answer, and has been done.
    api = Api({"success": True}, None, None, NOT_FOUND, None, NOT_FOUND, LED)
    assert await anew(api) == "n1"
    assert api.asked == ["DELETE", "CREATE", "DELETE", "DELETE", "CREATE", "DELETE", "CREATE"]
    waited_s = [waited or 0.0 for verb, waited in zip(api.asked, api.waited_s, strict=True) if verb == "CREATE"]
    assert 0 < waited_s[0] < waited_s[1] < waited_s[2], "each is waited for longer than the one before"


async def test_bad_luck_that_lasts_is_waited_out() -> None:
    api = Api(*[{"success": True}, None] * 3, {"success": True}, LED)
    assert await anew(api) == "n1"
    assert api.waited_s[-1] == ELECTION_S


async def test_nothing_is_made_before_what_there_was_is_said_to_be_gone() -> None:
    api = Api(None, NO_META_LEADER, NO_META_LEADER, {"success": True}, LED)
    assert await anew(api) == "n1"
    assert api.asked == ["DELETE"] * 4 + ["CREATE"]


async def test_what_is_refused_is_told() -> None:
    with pytest.raises(BadRequestError):
        await anew(Api(NOT_FOUND, EXISTS))


async def test_one_server_is_asked_once() -> None:
    api = Api({"success": True}, None)
    api.is_clustered = False
    with pytest.raises(NoAnswer):
        await anew(api)
    assert api.waited_s == [None, None]


async def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_renewal, "PATIENCE_S", 0.0)
    with pytest.raises(NoAnswer):
        await anew(Api(NOT_FOUND, None))


async def test_who_leads_a_consumer_is_asked_once() -> None:
    assert await leader_of_consumer(Api(LED), "S", "c") == "n1"  # type: ignore[arg-type]
    for answer in (None, NOT_FOUND, {"name": "c"}):
        assert await leader_of_consumer(Api(answer), "S", "c") == ""  # type: ignore[arg-type]


async def again(*answers: Mapping[str, Any] | None) -> tuple[str, list[str]]:
    api = Api(*answers)
    return await deliver_again(api, "S", "c", "7"), api.asked  # type: ignore[arg-type]


async def test_what_is_led_delivers_again_without_being_made_anew() -> None:
    ours = {**LED, "config": {"priority_groups": ["7"]}}
    assert await again(ours, {"reset_seq": 1}) == ("n1", ["INFO", "RESET"])
    # Its leader is being chosen.
    assert await again(None, NO_META_LEADER, ours, {"reset_seq": 1}) == ("n1", ["INFO", "INFO", "INFO", "RESET"])


async def test_what_can_not_deliver_again_is_to_be_made_anew() -> None:
    ours = {**LED, "config": {"priority_groups": ["7"]}}
    assert await again(NOT_FOUND) == ("", ["INFO"])
    assert await again({**LED, "config": {"priority_groups": ["8"]}}) == ("", ["INFO"])
    assert await again(ours, {"error": {"code": 400, "description": "bad request"}}) == ("", ["INFO", "RESET"])
    # An older server, or one that does not let us, says nothing.
    assert await again(ours, None, ours, None) == ("", ["INFO", "RESET"] * 2)
