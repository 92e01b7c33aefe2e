"""The commands of the page about security run as they are shown, but for the ports."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.docs.pages import SECURITY, blocks
from tests.support.models.zoo import write_identity
from tests.support.servers.certificates import Authority
from tests.support.servers.demo import DRAWN_PORTS, environment, in_venv

pytestmark = pytest.mark.timeout(120)


def commands(section: str) -> list[str]:
    """The commands of the `sh` blocks of a section."""
    text = (Path(__file__).parents[2] / SECURITY).read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    own = [block.text for block in blocks("sh") if block.page == SECURITY and block.text in text]
    return [line for block in own for line in block.splitlines() if line]


@contextmanager
def served(command: str, folder: Path, environ: dict[str, str]) -> Iterator[str]:
    """What the server that this command starts in `folder` prints when it is ready; it must end cleanly."""
    words = [*in_venv(command), *DRAWN_PORTS]
    process = subprocess.Popen(
        words, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    printed = ""
    while not re.search(r"^ +magika .*READY", printed, re.MULTILINE) and (line := process.stdout.readline()):
        printed += line
    try:
        yield printed
    finally:
        process.terminate()
        process.stdout.read()
        assert process.wait(60) == 0


def run(command: str, folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(in_venv(command), cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_encrypt(tmp_path: Path) -> None:
    write_identity(tmp_path / ".weir" / "demo" / "models", "magika", "FP32")
    Authority(tmp_path).sign("server")  # server.pem and server.key
    environ = {**environment(), "XDG_DATA_HOME": str(tmp_path / "share")}
    environ = {name: value for name, value in environ.items() if not name.startswith("WEIR_")}
    first, ask, infer, second = commands("Encrypt")
    with served(first, tmp_path, environ) as printed:
        (http,) = re.findall(r"^  HTTP +https://127\.0\.0\.1:(\d+)$", printed, re.MULTILINE)
        assert re.search(r"^  gRPC +grpcs://", printed, re.MULTILINE)
        assert re.search(r"^  certificate +SHA-256 ([0-9A-F]{2}:){31}[0-9A-F]{2}$", printed, re.MULTILINE)
        shown = ask.replace("curl -s", "curl").replace(".weir", str(tmp_path / ".weir")).replace(":8000", f":{http}")
        assert re.search(rf"^  try +{re.escape(shown)}$", printed, re.MULTILINE)
        assert '"name":"triton"' in run(ask.replace(":8000", f":{http}"), tmp_path, environ)
        assert "response of magika" in run(infer, tmp_path, environ)
    with served(second, tmp_path, environ) as printed:
        assert re.search(r"^  HTTP +https://", printed, re.MULTILINE)
        assert "response of magika" in run(infer, tmp_path, environ)
