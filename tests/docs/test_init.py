"""The commands of docs/init.md, in their order, in a folder with the files that the page names."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest

from tests.support.docs.pages import INIT, Block, blocks
from tests.support.models import onnx_files
from tests.support.models.torch_files import script
from tests.support.own_process import later, run_in_own_process
from tests.support.servers.demo import environment, in_venv
from tests.support.servers.weir_server import Server

torch = later("torch")

SERVE = ".venv/bin/weir serve --model-repository=models"


def write_script(folder: str) -> None:
    script(Path(folder), torch.nn.Linear(4, 3).requires_grad_(False))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(onnx_files.graph(), tmp_path / "digits.onnx")
    run_in_own_process(write_script, str(tmp_path))
    shutil.move(tmp_path / "1" / "model.pt", tmp_path / "iris.pt")
    (tmp_path / "1").rmdir()
    return tmp_path


def page(language: str) -> list[Block]:
    return [block for block in blocks(language) if block.page == INIT]


def run(command: str, folder: Path) -> str:
    done = subprocess.run(in_venv(command), cwd=folder, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), command
    return done.stdout


@pytest.mark.timeout(120)
def test_the_page_of_init(folder: Path) -> None:
    commands = [line for block in page("sh") for line in block.text.splitlines()]
    assert SERVE in commands
    making = [command for command in commands if " init " in command]
    asking = [command for command in commands if command.startswith("curl ")]
    assert sorted([*making, *asking, SERVE]) == sorted(commands)
    printed = [run(command, folder) for command in making]
    (shown,) = (block.text for block in page("text"))
    assert printed[0] == shown
    asking += [line.strip() for text in printed[1:] for line in text.splitlines() if line.startswith("  curl ")]
    assert len(asking) == len(making)
    inferring = [line.strip() for text in printed for line in text.splitlines() if line.startswith("  weir infer ")]
    assert len(inferring) == len(making)
    (folder / "server").mkdir()
    with Server(folder / "server", folder / "models") as server:
        server.wait_ready()
        for command in asking:
            response = json.loads(run(command.replace("localhost:8000", server.http_place), folder))
            assert f"/{response['model_name']}/" in command
        for command in inferring:
            shown = run(f".venv/bin/{command} --url={server.http_place}", folder)
            assert f"\nresponse of {command.split()[2]}, version 1, after " in shown
