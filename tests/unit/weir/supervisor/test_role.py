"""`Role`: what a process announces on its ready pipe, across restarts."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from weir.runtime.readiness import announce_ready
from weir.supervisor.role import Role, RoleSpec

ANNOUNCE = "import os, sys; os.write(int(os.environ['WEIR_READY_FD']), sys.argv[1].encode())"


@pytest.fixture
def lifeline_fd() -> Iterator[int]:
    read, write = os.pipe()
    yield read
    os.close(read)
    os.close(write)


def run(role: Role) -> int:
    """One life of the role, from its start to its exit; returns the exit status."""
    role.start(dict(os.environ))
    assert role.process is not None
    while not role.read_announcement():
        assert select.select([role.ready_fd], [], [], 20)[0]
    role.close_ready_pipe()
    return role.process.wait()


def role_that_writes(text: str, lifeline_fd: int) -> Role:
    return Role(RoleSpec(name="r", argv=(sys.executable, "-c", ANNOUNCE, text)), lifeline_fd)


def test_a_role_announces_facts(lifeline_fd: int) -> None:
    role = role_that_writes('{"ready": true, "http_port": 5}\n', lifeline_fd)
    assert run(role) == 0
    assert (role.ready, role.error, role.facts) == (True, None, {"http_port": 5})


def test_a_role_announces_why_it_can_not_start(lifeline_fd: int) -> None:
    role = role_that_writes('{"error": "no models"}\n', lifeline_fd)
    run(role)
    assert (role.ready, role.error) == (False, "no models")


@pytest.mark.parametrize("text", ["", "garbage\n", "[1]\n", '{"ready": false}\n'])
def test_anything_else_is_neither_ready_nor_an_error(text: str, lifeline_fd: int) -> None:
    role = role_that_writes(text, lifeline_fd)
    run(role)
    assert (role.ready, role.error) == (False, None)


def test_kept_facts_become_options_of_the_next_start(lifeline_fd: int) -> None:
    code = "import json, os, sys; os.write(int(os.environ['WEIR_READY_FD']), (json.dumps({'ready': True, 'port': 7, " \
        "'arguments': sys.argv[1:]}) + '\\n').encode())"  # fmt: skip
    role = Role(RoleSpec(name="r", argv=(sys.executable, "-c", code), kept_facts={"port": "--port"}), lifeline_fd)
    run(role)
    assert role.facts["arguments"] == []
    run(role)
    assert role.facts["arguments"] == ["--port", "7"]


def test_a_program_that_does_not_exist_leaves_no_pipe(lifeline_fd: int) -> None:
    role = Role(RoleSpec(name="r", argv=("/nowhere/program",)), lifeline_fd)
    with pytest.raises(OSError, match="nowhere"):
        role.start({})
    assert role.ready_fd is None


def test_facts_of_another_role_become_options(lifeline_fd: int) -> None:
    first = role_that_writes('{"ready": true, "port": 7}\n', lifeline_fd)
    run(first)
    code = "import json, os, sys; os.write(int(os.environ['WEIR_READY_FD']), (json.dumps({'ready': True, 'port': 9, " \
        "'arguments': sys.argv[1:]}) + '\\n').encode())"  # fmt: skip
    spec = RoleSpec(name="s", argv=(sys.executable, "-c", code), kept_facts={"port": "--port"}, facts_of="r")
    second = Role(spec, lifeline_fd, first)
    run(second)
    run(second)
    assert second.facts["arguments"] == ["--port", "7"]


PLACE = (
    "import json, os; os.write(int(os.environ['WEIR_READY_FD']), (json.dumps("
    "{'ready': True, 'on': sorted(os.sched_getaffinity(0)), 'own': os.environ.get('OWN')}) + '\\n').encode())"
)


def announce_place(arguments: Sequence[str]) -> None:
    announce_ready(on=sorted(os.sched_getaffinity(0)), own=os.environ.get("OWN"))


@pytest.mark.parametrize("main", [None, announce_place], ids=["a command", "forked"])
def test_a_role_has_its_own_processors_and_environment(
    main: Callable[[Sequence[str]], None] | None, lifeline_fd: int
) -> None:
    everywhere = os.sched_getaffinity(0)
    spec = RoleSpec(
        name="r",
        argv=(sys.executable, "-c", PLACE),
        environment={"OWN": "1"},
        processors=frozenset({max(everywhere)}),
        main=main,
    )
    role = Role(spec, lifeline_fd)
    run(role)
    assert role.facts == {"on": [max(everywhere)], "own": "1"}
    assert os.sched_getaffinity(0) == everywhere
