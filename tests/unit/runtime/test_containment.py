"""`contained` ends one request and lets the others go on."""

from __future__ import annotations

import asyncio

import pytest

from weir.runtime import containment
from weir.runtime.containment import SITES, contained, failures, report


class Responses:
    """Delivers a message of several responses, one of which may be broken."""

    def __init__(self) -> None:
        self.ended: list[object] = []

    def on_message(self, responses: list[object]) -> None:
        for response in responses:
            self.deliver(response)

    @contained(on_error="fail")
    def deliver(self, response: object) -> str:
        if isinstance(response, BaseException):
            raise response
        self.ended.append(response)
        return "delivered"

    def fail(self, error: Exception, response: object) -> str:
        if isinstance(response, ZeroDivisionError):
            raise RuntimeError("the request can't be ended either")
        self.ended.append(str(error))
        return "failed"

    @contained(on_error="fail", passes=(LookupError,))
    async def fetch(self, response: object) -> str:
        await asyncio.sleep(0)
        return self.deliver.__wrapped__(self, response)  # type: ignore[attr-defined]


NAME = f"{__name__}:Responses.deliver"


def test_an_exception_ends_its_own_request_alone() -> None:
    responses = Responses()
    responses.on_message([1, ValueError("broken"), 2])
    assert responses.ended == [1, "broken", 2]


def test_the_handler_gives_the_result() -> None:
    assert Responses().deliver(1) == "delivered"
    assert Responses().deliver(ValueError()) == "failed"


def test_a_handler_that_raises_is_contained_too() -> None:
    responses = Responses()
    responses.on_message([ZeroDivisionError(), 2])
    assert responses.ended == [2]


def test_what_is_not_an_exception_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        Responses().deliver(KeyboardInterrupt())


async def test_coroutines_are_contained_but_for_what_passes() -> None:
    responses = Responses()
    assert await responses.fetch(ValueError()) == "failed"
    with pytest.raises(KeyError):
        await responses.fetch(KeyError())
    with pytest.raises(asyncio.CancelledError):
        await responses.fetch(asyncio.CancelledError())


def test_failures_are_counted_and_logged_with_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containment, "_limiter", containment.LogLimiter(containment.logger))
    before = failures().get(NAME, 0)
    for _ in range(3):
        Responses().deliver(TypeError("no such thing"))
    report("tests: by hand", TypeError("no such thing"))
    assert failures()[NAME] == before + 3
    assert failures()["tests: by hand"] == 1
    assert [record.exc_info is not None for record in caplog.records] == [True, True]  # one for each place in a second
    assert "no such thing" in caplog.text


def test_an_exception_may_be_left_to_the_handler_to_log(caplog: pytest.LogCaptureFixture) -> None:
    class Quiet:
        @contained(on_error="fail", is_logged=False)
        def act(self) -> None:
            raise TypeError("no such thing")

        def fail(self, error: Exception) -> str:
            return str(error)

    assert Quiet().act() == "no such thing"
    assert sum(count for name, count in failures().items() if name.endswith("Quiet.act")) == 1
    assert not caplog.records


def test_a_test_may_replace_the_function_of_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(SITES[NAME], "function", broken)
    responses = Responses()
    responses.on_message([1, 2])
    assert responses.ended == ["injected", "injected"]
