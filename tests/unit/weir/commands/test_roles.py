"""The settings of roles from option values, and broker passwords that are removed from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from weir import NATS_URL_VARIABLE
from weir.bus.nats.access import PASSWORD_VARIABLE
from weir.commands.roles import check_gateway_options, forget_secrets, settings_of
from weir.errors import StartError
from weir.options import ROLES, options_of


def values(role: str, **given: Any) -> dict[str, Any]:
    """The values of all options of `role`: `given`, else their defaults."""
    defaults = {key: () if option.repeatable else option.default for key, option in options_of(role).items()}
    return {**defaults, "nats": "nats://127.0.0.1:1", **given}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_needs_a_broker(role: str) -> None:
    with pytest.raises(StartError, match="--nats must be specified"):
        settings_of(role, values(role, nats=None))


@pytest.mark.parametrize("role", ["gateway", "durable", "scheduler"])
def test_defaults_are_complete_settings(role: str) -> None:
    assert settings_of(role, values(role)).nats_url == "nats://127.0.0.1:1"


def test_a_worker_needs_a_repository(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--model-repository must be specified"):
        settings_of("worker", values("worker"))
    settings = settings_of("worker", values("worker", model_repository=(str(tmp_path),)))
    assert settings.model_repositories == (tmp_path,)


def test_a_missing_folder_is_an_error_unless_the_worker_continues_without(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(StartError, match="missing is not a folder"):
        settings_of("worker", values("worker", model_repository=(missing,)))
    assert settings_of("worker", values("worker", model_repository=(missing,), exit_on_error=False))


def test_a_scheduler_reads_folders_only(tmp_path: Path) -> None:
    settings = settings_of("scheduler", values("scheduler", model_repository=("nats://models", str(tmp_path))))
    assert settings.model_repositories == (tmp_path,)


def test_metrics_listen_where_http_does() -> None:
    settings = settings_of("gateway", values("gateway", http_address="0.0.0.0"))
    assert settings.metrics_address == "0.0.0.0"


def test_mutual_tls_is_tls() -> None:
    assert settings_of("gateway", values("gateway", grpc_use_ssl_mutual=True)).grpc_use_ssl


def test_gateway_options_are_checked_before_a_gateway_starts() -> None:
    given = values("gateway", nats=None)
    check_gateway_options(given)
    with pytest.raises(StartError):
        check_gateway_options({**given, "grpc_use_ssl": True, "grpc_server_cert": "missing.pem"})


def test_passwords_leave_the_environment_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "secret")
    monkeypatch.setenv(NATS_URL_VARIABLE, "nats://user:secret@host:4222")
    forget_secrets()
    assert PASSWORD_VARIABLE not in os.environ
    assert NATS_URL_VARIABLE not in os.environ
    monkeypatch.setenv(NATS_URL_VARIABLE, "nats://host:4222")
    forget_secrets()
    assert os.environ[NATS_URL_VARIABLE] == "nats://host:4222"
