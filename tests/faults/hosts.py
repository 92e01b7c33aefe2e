"""`Hosts`: several hosts on one machine as network namespaces, with a controllable network between them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from weir.runtime.child_processes import dies_with_parent

_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_NET = f"10.213.{os.getpid() % 254 + 1}"  # another one for each driver: several may be at work on a machine
_ROOT = Path(__file__).parents[2]

HERE = "here"
"""The host of the driver and its clients."""


def missing() -> str:
    """Why this machine can't have network namespaces; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (package iproute2)"
    if not _TUN.exists():
        return f"there is no {_TUN}"
    try:
        with _tap("wftest"):
            pass
        subprocess.run(["unshare", "--net", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no TAP devices or network namespaces: {error}"
    return ""


class Hosts:
    """Hosts as network namespaces. `names` are those besides `HERE`."""

    def __init__(self, names: Sequence[str], switch: subprocess.Popen[bytes], namespaces: dict[str, str]) -> None:
        self._places = {name: number for number, name in enumerate((HERE, *names))}
        self._switch = switch
        self._namespaces = namespaces

    def address(self, name: str) -> str:
        """The address of a host."""
        return f"{_NET}.{self._places[name] + 1}"

    def prefix(self, name: str) -> tuple[str, ...]:
        """Arguments in front of a command that run it on a host."""
        return () if name == HERE else ("ip", "netns", "exec", self._namespaces[name])

    def link(self, source: str, target: str, lost: float = 0.0, delay_s: float = 0.0) -> None:
        """From now on so much is lost, and so late, on the way from one to another, and only that way."""
        assert self._switch.stdin is not None
        rule = [self._places[source], self._places[target], lost, delay_s]
        self._switch.stdin.write(json.dumps(rule).encode() + b"\n")
        self._switch.stdin.flush()

    def cut(self, one: str, other: str, lost: float = 1.0, delay_s: float = 0.0) -> None:
        """The same both ways."""
        self.link(one, other, lost, delay_s)
        self.link(other, one, lost, delay_s)


@contextlib.contextmanager
def hosts(names: Sequence[str], seed: int) -> Iterator[Hosts]:
    """Makes hosts, and removes them. Raises OSError or subprocess.CalledProcessError where that fails."""
    namespaces: dict[str, str] = {}
    with contextlib.ExitStack() as undo:
        ports: list[int] = []
        for number, name in enumerate((HERE, *names)):
            device = f"wf{os.getpid() % 100_000}x{number}"
            ports.append(undo.enter_context(_tap(device)))
            before: tuple[str, ...] = ()
            if name != HERE:
                namespaces[name] = device
                _ip("netns", "add", device)
                undo.callback(_ip, "netns", "del", device)
                _ip("link", "set", device, "netns", device)
                before = ("-n", device)
                _ip(*before, "link", "set", "lo", "up")
            _ip(*before, "addr", "add", f"{_NET}.{number + 1}/24", "dev", device)
            _ip(*before, "link", "set", device, "up")
        switch = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.switch", str(seed), *map(str, ports)],
            stdin=subprocess.PIPE,
            pass_fds=ports,
            cwd=_ROOT,
            preexec_fn=dies_with_parent(),
        )
        undo.callback(_end, switch)
        yield Hosts(names, switch, namespaces)


@contextlib.contextmanager
def _tap(name: str) -> Iterator[int]:
    fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
        yield fd
    finally:
        os.close(fd)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
