"""Which of ONNX Runtime's packages is installed, and the library itself, imported when a model first needs it."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from schemas.errors import internal

NOT_INSTALLED = "the onnxruntime package is not installed: install weir-serve[cpu] or weir-serve[gpu]"

NO_CUDA = "the installed onnxruntime has no CUDA provider: install weir-serve[gpu] in the place of weir-serve[cpu]"

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")


class Installation(NamedTuple):
    """What is installed: the version ("" where no package says it), and whether there is a CUDA provider.

    The library itself is no witness: without a driver it lists the CUDA provider as well. `problem` is what is wrong with
    it, "" for nothing.
    """

    version: str
    has_cuda: bool
    problem: str = ""


def installation() -> Installation | None:
    """Finds out without importing anything; None where there is no ONNX Runtime."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    problem = ""
    if len(versions) > 1:
        # Their files overwrite each other, whatever is uninstalled: https://github.com/microsoft/onnxruntime/issues/26996
        problem = f"{' and '.join(versions)} own the same files: uninstall all of them, and install one"
    has_cuda = any((Path(spec.origin).parent / "capi").glob("*onnxruntime_providers_cuda.*"))
    return Installation(next(iter(versions.values()), ""), has_cuda, problem)


def library() -> Any:
    """The module `onnxruntime`. Raises WeirError where it isn't installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise internal(NOT_INSTALLED) from error
    return onnxruntime


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
