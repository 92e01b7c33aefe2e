"""The two log formats, and that nothing logged can forge an entry."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weir.schemas.core.errors import WeirError
from weir.telemetry.log_settings import LogOptions, LogSettings
from weir.telemetry.logs import JsonFormatter, RoleLog, TextFormatter


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
def test_details_are_logged_at_verbose_level_1(verbose: int, shown: list[str]) -> None:
    code = (
        "import logging; from weir.telemetry.log_settings import LogSettings\n"
        "from weir.telemetry.logs import configure_logging\n"
        f"configure_logging('worker', LogSettings(log_format='json', log_verbose_level={verbose}))\n"
        "logging.getLogger('weir.x').debug('detail'); logging.getLogger('weir.x').info('news')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [json.loads(line)["level"] for line in ran.stderr.splitlines()] == shown
    assert ran.stdout == ""


def test_headers_of_clients_are_not_logged_at_any_level() -> None:
    code = (
        "import logging; from weir.telemetry.log_settings import LogSettings\n"
        "from weir.telemetry.logs import configure_logging\n"
        "configure_logging('gateway', LogSettings(log_verbose_level=9))\n"
        "import hpack; logging.getLogger('other').debug('details of a library')\n"
        "hpack.Decoder().decode(hpack.Encoder().encode([('authorization', 'hush')]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "details of a library" in ran.stderr
    assert "hush" not in ran.stderr


def test_iso8601_has_triton_s_layout() -> None:
    line = TextFormatter("worker", is_iso8601=True).format(record("news", logging.WARNING))
    assert re.fullmatch(rf'\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ W {os.getpid()} worker here.py:7\] "news"', line)


def test_messages_are_not_escaped_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    assert TextFormatter("worker").format(record('two\nlines "quoted"')).endswith('] two\nlines "quoted"')


def test_levels_are_switched_one_by_one_while_the_process_runs_and_go_to_its_file(tmp_path: Path) -> None:
    code = (
        "import logging, sys; from weir.telemetry.log_settings import LogSettings\n"
        "from weir.telemetry.logs import configure_logging, current_settings\n"
        "log = configure_logging('worker', LogSettings(log_file=sys.argv[1], log_info=False))\n"
        "ours, theirs = logging.getLogger('weir.x'), logging.getLogger('library')\n"
        "def say(what): [getattr(of, level)(what) for of in (ours, theirs) for level in ('debug', 'info', 'warning')]\n"
        "say('first')\n"
        "log.take('', b'{\"log_info\": true, \"log_warning\": false, \"log_verbose_level\": 1}'); say('second')\n"
        "log.take('', b''); say('third')\n"
        "log.take('', b'{\"log_error\": false, \"log_warning\": false}'); say('none'); ours.critical('last')\n"
        "assert current_settings() is log.settings and log.changes == {'log_error': False, 'log_warning': False}\n"
    )
    path = tmp_path / "log"
    ran = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    lines = [(line[0], line.rpartition(" ")[2]) for line in path.read_text().splitlines()]
    assert lines == [
        ("W", '"first"'),
        ("W", '"first"'),
        ("D", '"second"'),
        ("I", '"second"'),
        ("I", '"second"'),
        ("W", '"third"'),
        ("W", '"third"'),
        ("F", '"last"'),
    ]


def test_an_unwritable_log_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match="can't be written: No such file"):
        RoleLog("worker", LogSettings(log_file=str(tmp_path / "none" / "log")))


def test_an_unknown_format_is_rejected() -> None:
    with pytest.raises(ValueError, match="'xml'"):
        LogSettings.of(LogOptions(log_format="xml"))
