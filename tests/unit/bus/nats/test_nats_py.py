"""Weir's processes import nats-py without aiohttp, whichever of their modules imports nats-py first."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENTRIES = (
    "weir.scheduler.main",
    "weir.worker.main",
    "weir.durable.main",
    "weir.gateway.main",
    "weir.commands.status.watch",
    "weir.commands.push",
    "weir.commands.dead_letters",
)


@pytest.mark.parametrize("module", ENTRIES)
def test_aiohttp_is_not_imported(module: str) -> None:
    code = f"import sys, {module}; print('nats' in sys.modules, 'aiohttp' in sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "False"]


def test_code_of_users_can_import_aiohttp() -> None:
    code = "import weir.bus.nats.nats_py, aiohttp; print(bool(aiohttp.ClientSession))"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "True"
