"""`EnvironmentCache`: environments of Python models, made once on a host and kept.

Each has a folder of its own, named by what it was made of. Who makes it holds a lock that other workers and threads wait
for; it is there once a mark lies in it, so one that was left half made is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from repository.small_files import MAX_REQUIREMENTS_BYTES, read_small_file
from schemas.errors import WeirError, internal
from worker.process_group import GroupTie

logger = logging.getLogger("weir.worker")

CACHE_SETTING = "environment-cache"
"""The setting of the backend that names the folder (`--backend-config=python,environment-cache=...`)."""

INSTALL_TIMEOUT_S = 1800.0
"""How long an installation of requirements may take."""

_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w.,\s-]*\])?\s*([<>=!~][^/@\\]*)?(;[^/@\\]*)?", re.ASCII)
_ARCHIVES = (".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".lz", ".tlz", ".lzma")
_LAST_LINES = 12
_MARK = ".complete"


class EnvironmentCache:
    """See the module. `folder` is made when it is needed. Everything blocks, and is for any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> EnvironmentCache:
        """The cache that the backend's settings name; else that of the user, in `$XDG_CACHE_HOME` or `~/.cache`."""
        named = settings.get(CACHE_SETTING)
        if named:
            return cls(Path(named))
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls(Path(home) / "weir" / "python-environments")

    def unpacked(self, archive: Path) -> Path:
        """The folder of a packed environment. One that has changed on disk is another one.

        Raises WeirError (INTERNAL) for a file that is none, or has members that lie outside of it.
        """
        status = archive.stat()
        key = _key("archive", str(archive), str(status.st_size), str(status.st_mtime_ns))

        def unpack(folder: Path) -> None:
            logger.info("unpacking the Python environment %s", archive)
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(folder, filter="data")
            except (tarfile.TarError, EOFError, OSError, ValueError) as error:
                raise internal(f"failed to unpack the Python environment '{archive}': {error}") from error

        return self._made(key, unpack)

    def installed(self, requirements: Path, folder: Path) -> Path:
        """The interpreter of an environment with the worker's own packages and those that `requirements` names.

        What the file says of relative paths is relative to `folder`; models whose files name packages alone, and the same
        ones, share an environment. Raises WeirError (INTERNAL) with the last lines of the
        tool that failed.
        """
        try:
            text = read_small_file(requirements, MAX_REQUIREMENTS_BYTES).decode(errors="replace")
        except OSError as error:
            raise internal(f"failed to read the requirements '{requirements}': {error.strerror}") from error
        key = _key("requirements", text, sys.version, sys.prefix, "" if _names_packages_alone(text) else str(folder))

        def install(environment: Path) -> None:
            logger.info("installing %s", requirements)
            python = str(environment / "bin" / "python")
            temporary = environment / ".tmp"
            temporary.mkdir()
            uv = shutil.which("uv")
            if uv is not None:
                make = [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(environment)]
                add = [uv, "pip", "install", "--python", python, "-r", str(requirements)]
            else:
                make = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
                add = [sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check"]
                add += ["--no-input", "-r", str(requirements)]
            _run(make, folder, requirements, temporary)
            self._lend_own_packages(environment)
            _run(add, folder, requirements, temporary)
            shutil.rmtree(temporary, ignore_errors=True)

        return self._made(key, install) / "bin" / "python"

    @staticmethod
    def _lend_own_packages(environment: Path) -> None:
        """The worker's packages come behind those of the environment, which has its own of the same names first."""
        site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
        own = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        (site_packages / "weir-own.pth").write_text("\n".join(own) + "\n")

    def _made(self, key: str, make: Callable[[Path], None]) -> Path:
        folder = self._folder / key
        mark = folder / _MARK
        if mark.exists():
            return folder
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder / f"{key}.lock"):
                if not mark.exists():
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir()
                    try:
                        make(folder)
                    except WeirError:
                        shutil.rmtree(folder, ignore_errors=True)
                        raise
                    mark.touch()
        except OSError as error:
            raise internal(f"failed to make a Python environment in '{self._folder}': {error}") from error
        return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _names_packages_alone(text: str) -> bool:
    """Whether requirements mean the same wherever they lie: no option, no path, no file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return all(_PACKAGE.fullmatch(line) and not line.lower().endswith(_ARCHIVES) for line in lines if line)


def _key(*facts: str) -> str:
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _run(command: list[str], folder: Path, requirements: Path, temporary: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("WEIR_", "NATS_"))}
    variables["TMPDIR"] = str(temporary)  # what is killed leaves nothing where nobody looks for it
    with closing(GroupTie()) as tie:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=variables,
                pass_fds=[tie.fd],
                start_new_session=True,
            )
            tie.tie(process.pid)
            try:
                told, _ = process.communicate(timeout=INSTALL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                tie.close()
                process.communicate()
                raise
        except (OSError, subprocess.TimeoutExpired) as error:
            raise internal(f"failed to install '{requirements.name}': {error}") from error
    if process.returncode != 0:
        last = "\n".join(told.strip().splitlines()[-_LAST_LINES:])
        raise internal(f"failed to install '{requirements.name}': {last}")
