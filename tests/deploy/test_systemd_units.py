"""The units of `compose/systemd/` are valid, run commands that Weir has, and are hardened."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deploy.compose_project import ROOT, rejection

FOLDER = ROOT / "compose" / "systemd"
UNITS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".service", ".target"))
SERVICES = [name for name in UNITS if name.endswith(".service")]
INSTANCES = {"weir-gateway@.service": "8003", "weir-scheduler@.service": "1", "weir-worker@.service": "1"}

WORST_SCORE = {"weir-nats.service": 1.6}
"""`systemd-analyze security` gives 0 to 10, less is better; a service without any of it has 9.6."""

WORST_OF_WEIR = 1.8

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def settings(name: str) -> dict[str, list[str]]:
    """The values of each setting of a unit, with continued lines joined."""
    text = (FOLDER / name).read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found.setdefault(key, []).append(value.strip())
    return found


def installed(folder: Path) -> list[Path]:
    """The units as they are installed, with an instance of each template, and the programs of this environment."""
    programs = f"{Path(sys.executable).parent}/"
    paths = []
    for name in UNITS:
        instance = name.replace("@.", f"@{INSTANCES[name]}.") if name in INSTANCES else name
        paths.append(folder / instance)
        paths[-1].write_text((FOLDER / name).read_text().replace("/opt/weir/bin/", programs))
    return paths


@needs_systemd
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *installed(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_a_wrong_setting_is_found(tmp_path: Path) -> None:
    paths = installed(tmp_path)
    paths[0].write_text(paths[0].read_text().replace("RestartSec=1", "RestartSex=1"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *paths], capture_output=True, text=True
    )
    assert "RestartSex" in done.stderr


@needs_systemd
@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_hardened(name: str, tmp_path: Path) -> None:
    path = dict(zip(UNITS, installed(tmp_path), strict=True))[name]
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", path], capture_output=True, text=True
    )
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= WORST_SCORE.get(name, WORST_OF_WEIR), done.stdout


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "weir-nats.service"])
def test_a_command_is_weirs_and_ends_in_time(name: str) -> None:
    found = settings(name)
    program, *arguments = shlex.split(found["ExecStart"][0].replace("%i", "8003"))
    assert program == "/opt/weir/bin/weir"
    assert arguments.pop() == "$WEIR_OPTIONS"
    needed = ["--model-repository=/srv/weir/models"] if arguments[0] in ("serve", "worker") else []
    assert rejection([*arguments, *needed]) is None
    (exit_s,) = [float(word.partition("=")[2]) for word in arguments if word.startswith("--exit-timeout-secs=")]
    assert float(found["TimeoutStopSec"][0]) > 1.5 * exit_s + 5
    assert found["Type"] == ["notify"]
    assert found["KillMode"] == ["mixed"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_descriptors_and_starts_again(name: str) -> None:
    found = settings(name)
    assert int(found["LimitNOFILE"][0]) >= 65536
    assert found["Restart"] == ["always"]
    assert found["StartLimitIntervalSec"] == ["0"]
    assert found["User"] == ["weir"]


def test_gateways_share_their_ports() -> None:
    (command,) = settings("weir-gateway@.service")["ExecStart"]
    assert "--reuse-http-port=true" in command
    assert "--reuse-grpc-port=true" in command
    assert "--metrics-port=%i" in command


def test_the_documentation_names_every_unit() -> None:
    page = (ROOT / "docs" / "systemd.md").read_text()
    assert [name for name in UNITS if name not in page] == []
