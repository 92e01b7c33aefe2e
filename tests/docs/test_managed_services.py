"""The commands of the pages about managed services: each page's server is started, and asked as the page does."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.docs.pages import MANAGED_SERVICES, blocks
from tests.support.servers.demo import DRAWN_PORTS, Served, environment, in_venv

PORT_OPTIONS = {"docs/sagemaker.md": "--sagemaker-port=0", "docs/vertex-ai.md": "--vertex-ai-port=0"}
ROWS = {"docs/sagemaker.md": "SageMaker", "docs/vertex-ai.md": "Vertex AI"}


@pytest.mark.parametrize("page", MANAGED_SERVICES)
def test_commands(page: str, served: Served, tmp_path: Path) -> None:
    start, *others = [block.text.strip() for block in blocks("sh") if block.page == page]
    variables, _, command = start.partition(".venv/")
    given = dict(variable.split("=", 1) for variable in variables.split())
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*in_venv(f".venv/{command}"), *DRAWN_PORTS, PORT_OPTIONS[page], f"--data-dir={tmp_path / 'data'}"],
            cwd=served.folder,
            env={**environment(), **given},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    try:
        printed = ""
        while "magika " not in printed and (line := process.stdout.readline()):
            printed += line
        place = re.search(rf"{ROWS[page]} +http://(\S+)", printed)
        assert place, printed + log.read_text()
        for line in "\n".join(others).splitlines():
            asked = line.replace("localhost:8080", place[1])
            done = subprocess.run(
                ["bash", "-c", asked], cwd=served.folder, env=os.environ, capture_output=True, text=True
            )
            assert done.returncode == 0, line
            assert "magika" in done.stdout or line.endswith(("/ping", "/health")), line
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0, log.read_text()
