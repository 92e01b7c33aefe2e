"""Commands from the option table: bare options, exclusive options, and the arguments passed to roles."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from weir.commands.option_commands import command, read_values, with_implied_values
from weir.commands.preflight import Listener
from weir.commands.roles import settings_of
from weir.commands.serve import listeners_of, role_command
from weir.commands.terminal import SectionedCommand
from weir.options import UsageError, options_of


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        (["serve", "--strict-readiness"], ["serve", "--strict-readiness=true"]),
        (["--strict-readiness", "--http-port", "1"], ["--strict-readiness=true", "--http-port", "1"]),
        (["--strict-readiness", "off"], ["--strict-readiness", "off"]),
        (["--strict-readiness=off"], ["--strict-readiness=off"]),
        (["--log-verbose", "--exit-on-error"], ["--log-verbose=1", "--exit-on-error=true"]),
        (["--log-verbose", "2"], ["--log-verbose", "2"]),
        (["--http-port", "--id", "x"], ["--http-port", "--id", "x"]),
        ([], []),
    ],
)
def test_bare_options_get_the_value_they_imply(given: list[str], completed: list[str]) -> None:
    assert with_implied_values(given) == completed


def test_arguments_are_values_of_one_option_and_no_type_of_python_is_shown() -> None:
    found: list[dict[str, Any]] = []
    app = typer.Typer()
    app.command(cls=SectionedCommand)(command("serve", "Serve.", found.append, positional="model_repository"))
    for words in (["models"], ["--http-port=9", "models", "--model-store=more"], ["--model-repository=models"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert [values["model_repository"] for values in found] == [("models",), ("more", "models"), ("models",)]
    assert found[1]["http_port"] == 9
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "[FOLDER]...\n" in shown
    assert "As --model-repository." in shown
    assert "list[" not in shown


def test_startup_models_need_explicit_control() -> None:
    serve = options_of("serve")
    with pytest.raises(UsageError, match=r"^Use of '--load-model' requires setting '--model-control-mode=explicit'"):
        read_values(serve, {"load_model": ["a"]})
    with pytest.raises(UsageError, match=r"^Wildcard model name '\*' must be the ONLY startup model if specified at"):
        read_values(serve, {"load_model": ["a", "*"], "model_control_mode": "explicit"})
    values = read_values(serve, {"load_model": ["*", "*"], "model_control_mode": "explicit"})
    assert set(values["load_model"]) == {"*"}


def test_roles_are_told_what_is_not_the_default_and_only_what_they_take() -> None:
    texts = {
        "model_repository": ["/a", "/b"],
        "http_port": "0",
        "allow_client_shm": "on",
        "log_verbose": "2",
        "nats": "nats://secret@host",
        "buffer_manager_thread_count": "1",
    }
    values = read_values(options_of("serve"), texts)
    words = {role: role_command(role, values)[4:] for role in ("gateway", "scheduler", "worker")}
    assert words == {
        "gateway": ("gateway", "--http-port=0", "--allow-client-shm=true", "--log-verbose=2"),
        "scheduler": ("scheduler", "--model-repository=/a", "--model-repository=/b", "--log-verbose=2"),
        "worker": (
            "worker",
            "--model-repository=/a",
            "--model-repository=/b",
            "--allow-client-shm=true",
            "--log-verbose=2",
        ),
    }


def test_settings_of_a_worker(tmp_path: Path) -> None:
    texts = {
        "nats": "nats://x",
        "model_repository": [str(tmp_path)],
        "model_control_mode": "explicit",
        "load_model": ["a", "b"],
        "backend_config": ["onnxruntime,x=1"],
    }
    settings = settings_of("worker", read_values(options_of("worker"), texts))
    assert settings.model_repositories == (tmp_path,)
    assert settings.load_model == ("a", "b")
    assert settings.backend_config == ("onnxruntime,x=1",)


def test_metrics_listen_where_http_does_and_mutual_tls_is_tls() -> None:
    options = options_of("gateway")
    settings = settings_of("gateway", read_values(options, {"nats": "nats://x", "http_address": "::1"}))
    assert settings.metrics_address == "::1"
    assert not settings.grpc_use_ssl
    texts = {"nats": "nats://x", "grpc_use_ssl_mutual": "true", "metrics_address": "127.0.0.2"}
    settings = settings_of("gateway", read_values(options, texts))
    assert settings.metrics_address == "127.0.0.2"
    assert settings.grpc_use_ssl


def test_only_allowed_doors_are_listened_to() -> None:
    texts = {"allow_http": "false", "http_address": "::1", "metrics_port": "0", "reuse_grpc_port": "true"}
    assert listeners_of(read_values(options_of("serve"), texts)) == {
        "grpc": Listener("GRPC", "127.0.0.1", 8001, shares=True),
        "metrics": Listener("metrics", "::1", 0),
    }
