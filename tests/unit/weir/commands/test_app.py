"""The `weir` command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from weir import __version__
from weir.commands.app import main


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"weir {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve"], "error: --model-repository must be specified"),
        (["serve", "--model-store", "nowhere"], "error: model repository nowhere is not a folder"),
        (["worker", "--nats", "nats://x"], "error: --model-repository must be specified"),
        (["gateway"], "error: --nats must be specified"),
        (["scheduler"], "error: --nats must be specified"),
    ],
)
def test_what_is_missing_is_told_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIR_NATS_URL", raising=False)
    assert exit_code(*arguments) == 1
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["history", "m", "--json", "--url", "127.0.0.1:1"],
        ["traffic", "show", "m", "--json", "--url", "127.0.0.1:1"],
        ["dead", "list", "--json", "--nats", "nats://127.0.0.1:1"],
        ["batch", "list", "--url", "127.0.0.1:1", "--json"],
    ],
)
def test_json_needs_no_value_in_any_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 1  # they go on to look for the server
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_an_unknown_truth_value_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("serve", "--strict-readiness=maybe") == 2
    assert "maybe" in capsys.readouterr().err


def test_the_parent_imports_no_array_library_and_no_event_loop() -> None:
    code = (
        "import sys, weir.commands.app, weir.commands.serve\n"
        "print([name for name in ('numpy', 'asyncio', 'onnxruntime', 'torch', 'grpc') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "further"),
    [("--help", ("pydantic",)), ("--version", ("pydantic",)), ("serve --help", ()), ("status --help", ())],
    ids=str,
)
def test_help_imports_nothing_that_only_a_running_command_needs(words: str, further: tuple[str, ...]) -> None:
    """typer imports pydantic to parse options of a subcommand."""
    heavy = ("asyncio", "grpc", "httpx", "msgspec", "nats", "numpy", "obstore", "opentelemetry", "orjson", *further)
    heavy += ("prometheus_client", "rich", "starlette", "textual", "tritonclient", "uvloop")
    late = ("serve", "backends", "dead_letters", "doctor.run", "init.making", "perf.run", "push", "status", "top")
    code = (
        "import sys, contextlib, io\n"
        "from weir.commands.app import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main({words.split()})\n"
        "print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(ran.stdout.split())
    assert "weir.commands.app" in modules
    assert modules & {*heavy, *(f"weir.commands.{name}" for name in late), "weir.supervisor.supervisor"} == set()


def test_roles_run_our_packages_whatever_lies_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "schemas.py").write_text("raise SystemExit('the wrong schemas')")
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "weir", "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stdout == f"weir {__version__}\n", ran.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["serve", "--http-port", "abc"],
            'Bad option: "--http-port". Invalid option value. Got abc. It must be a whole number.',
        ),
        (
            ["serve", "--cache-config=local,size=1", "--cache-config=nats,size=1"],
            "found multiple cache configurations, but only a single cache is currently supported",
        ),
        (
            ["serve", "--cache-config=local,size=1", "--cache-config=redis,host=a"],
            "found multiple cache configurations, but only a single cache is currently supported",
        ),
        (
            ["gateway", "--allow-http", "maybe"],
            'Bad option: "--allow-http". invalid value for bool option: maybe. Choose true or false.',
        ),
        (
            ["worker", "--load-model=a"],
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
        ),
    ],
)
def test_wrong_usage_is_told_in_triton_s_words(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_two_doors_at_one_port_are_told_in_triton_s_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--model-repository={tmp_path}", "--http-port=39998", "--metrics-port=39998", "--allow-grpc=false"]
    assert exit_code("serve", *words) == 1
    assert capsys.readouterr().err == (
        "error: The server cannot listen to HTTP requests and metrics requests "
        "at the same address and port 127.0.0.1:39998\n"
    )


def test_an_invalid_address_of_an_object_store_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("serve", "--model-repository=s3:///models") == 1
    assert capsys.readouterr().err == "error: invalid model repository: 's3:///models' names no bucket\n"


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("bash", {"COMP_WORDS": "weir serve --model-con", "COMP_CWORD": "2"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "weir serve --model-con"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "weir serve --model-con", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_shells_complete_options(
    shell: str, words: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_WEIR_COMPLETE", f"source_{shell}")
    assert exit_code() == 0
    assert f"_WEIR_COMPLETE=complete_{shell}" in capsys.readouterr().out
    monkeypatch.setenv("_WEIR_COMPLETE", f"complete_{shell}")
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    assert exit_code() == 0
    assert "--model-control-mode" in capsys.readouterr().out


def test_shells_complete_the_choices_of_an_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_WEIR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "weir serve --model-control-mode ")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert exit_code() == 0
    assert capsys.readouterr().out.split() == ["none", "poll", "explicit"]
