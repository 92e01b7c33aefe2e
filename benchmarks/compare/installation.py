"""Installs Triton for `make bench`, and finds the installed load generators."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

PYTRITON = "nvidia-pytriton==0.7.0"
"""The wheel brings tritonserver 2.51 with its Python backend; no other backend comes without a container."""

_PACKAGES = {"wrk": "wrk", "h2load": "nghttp2-client"}


def missing_load_generators() -> list[str]:
    """Debian packages that would make the load generators cheaper, and so the figures better."""
    return [package for program, package in _PACKAGES.items() if shutil.which(program) is None]


@dataclass(frozen=True)
class TritonInstallation:
    """Triton in a virtual environment of its own, with the ONNX Runtime that Weir runs here."""

    folder: Path

    def install(self) -> None:
        """Does nothing when it is installed already. Raises SystemExit with what is missing."""
        wanted = [PYTRITON, f"onnxruntime=={metadata.version('onnxruntime')}"]
        receipt = self.folder / "installed.txt"
        if not receipt.exists() or receipt.read_text().split() != wanted:
            print(f"installing {' '.join(wanted)} into {self.folder}", flush=True)
            shutil.rmtree(self.folder, ignore_errors=True)
            try:
                subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
                subprocess.run([self.python, "-m", "pip", "install", "--quiet", *wanted], check=True)
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"Triton can't be installed: {error}") from error
            receipt.write_text("\n".join(wanted))
        linked = subprocess.run(["ldd", self._stub], env=self.environment, capture_output=True, text=True, check=True)
        missing = [line.split()[0] for line in linked.stdout.splitlines() if "not found" in line]
        if missing:
            package = f"libpython{_python_version()}"
            raise SystemExit(f"Triton's Python backend lacks {', '.join(missing)}: apt-get install {package}")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def server(self) -> Path:
        return self._distribution / "bin" / "tritonserver"

    @property
    def environment(self) -> dict[str, str]:
        """For the server and for its Python backend, which takes the first `python3` of the path for its prefix."""
        libraries = (str(self._packages / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR") or "")
        return os.environ | {
            "LD_LIBRARY_PATH": ":".join(filter(None, (*libraries, os.environ.get("LD_LIBRARY_PATH")))),
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
        }

    def write_backends(self, folder: Path) -> None:
        """Puts the Python backend together: the wheel keeps its stubs, one for each version of Python, apart."""
        shutil.copytree(self._distribution / "backends" / "python", folder / "python")
        stub = folder / "python" / self._stub.name
        shutil.copy(self._stub, stub)
        stub.chmod(0o755)
        self.server.chmod(0o755)

    @property
    def _distribution(self) -> Path:
        return self._packages / "pytriton" / "tritonserver"

    @property
    def _stub(self) -> Path:
        return self._distribution / "python_backend_stubs" / _python_version() / "triton_python_backend_stub"

    @cached_property
    def _packages(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
