"""The two log formats, and that nothing logged can forge an entry."""

import json
import logging
import os
import re
import subprocess
import sys

import pytest

from telemetry.logs import JsonFormatter, TextFormatter, configure_logging


def record(message: str, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelno": level, "levelname": logging.getLevelName(level)})
    made.name, made.filename, made.lineno = "weir.test", "here.py", 7
    made.__dict__.update(extra)
    return made


def test_text_has_triton_s_layout_with_role_and_process() -> None:
    line = TextFormatter("gateway").format(record("Started HTTPService at 127.0.0.1:8000"))
    time, rest = line[:21], line[21:]
    assert re.fullmatch(r"I\d{4} \d\d:\d\d:\d\d\.\d{6}", time)
    assert rest == f' {os.getpid()} gateway here.py:7] "Started HTTPService at 127.0.0.1:8000"'


@pytest.mark.parametrize(
    ("level", "letter"), [(logging.DEBUG, "D"), (logging.WARNING, "W"), (logging.ERROR, "E"), (logging.CRITICAL, "F")]
)
def test_text_starts_with_the_level_s_letter(level: int, letter: str) -> None:
    assert TextFormatter("worker").format(record("x", level)).startswith(letter)


@pytest.mark.parametrize(
    "hostile",
    [
        'a\nI0101 00:00:00.000000 1 x y:1] "forged"',
        "\x1b[2J",
        "\r",
        "\x00",
        "\x7f",
        "\x9b",
        "\u2028",
        "\u202e",
        "\ud800",
    ],
)
@pytest.mark.parametrize("formatter", [TextFormatter("gateway"), JsonFormatter("gateway")])
def test_unprintable_characters_are_escaped(hostile: str, formatter: logging.Formatter) -> None:
    line = formatter.format(record(f"before {hostile} after"))
    assert line.isprintable()
    assert line.encode()


def test_plain_text_of_any_language_stays() -> None:
    assert '"模型 ünï 🦀"' in TextFormatter("gateway").format(record("模型 ünï 🦀"))


def test_a_traceback_follows_as_indented_lines() -> None:
    try:
        raise ValueError("first\nE0101 forged")
    except ValueError:
        failed = record("it failed", logging.ERROR, exc_info=sys.exc_info())
    head, *rest = TextFormatter("worker").format(failed).splitlines()
    assert head.endswith('"it failed"')
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert json.loads(JsonFormatter("worker").format(failed))["exception"].endswith("E0101 forged")


def test_json_holds_the_entry_and_what_was_given_beside_it() -> None:
    entry = json.loads(JsonFormatter("scheduler").format(record("hello", logging.WARNING, model="m", shape=(1, 2))))
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "warning",
        "role": "scheduler",
        "pid": os.getpid(),
        "logger": "weir.test",
        "message": "hello",
        "model": "m",
        "shape": [1, 2],
    }


@pytest.mark.parametrize(("verbose", "shown"), [(0, ["info"]), (1, ["debug", "info"])])
def test_details_are_logged_when_asked_for(verbose: int, shown: list[str]) -> None:
    code = (
        "import logging; from telemetry.logs import configure_logging\n"
        f"configure_logging('worker', 'json', {verbose})\n"
        "logging.getLogger('weir.x').debug('detail'); logging.getLogger('weir.x').info('news')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [json.loads(line)["level"] for line in ran.stderr.splitlines()] == shown
    assert ran.stdout == ""


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'xml'"):
        configure_logging("worker", "xml")
