"""ONNX Runtime's library and its sessions, which are opened on exactly the configured providers, and their errors.

The library is imported when a model first needs it; `installation` inspects the installed packages without an import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weir.schemas.core.errors import WeirError, internal, unavailable
from weir.worker.backend_api.interface import DeviceLost, ModelVersion, installed_version
from weir.worker.backends.onnxruntime.options import CUDA, OnnxOptions, Provider
from weir.worker.cuda.runtime import STICKY

_CUDA_FAILURE = re.compile(r"CUDA (?:failure|error) (\d+)")
_OUT_OF_MEMORY = ("CUDA failure 2:", "CUDA error 2:", "Failed to allocate memory")
_BUILD_DETAIL = re.compile(r" ; GPU=.*", re.DOTALL)


def open_session(
    library: Any,
    model: ModelVersion,
    options: OnnxOptions,
    providers: Sequence[Provider],
    *,
    describing: bool = False,
) -> Any:
    """An `InferenceSession` on exactly these providers.

    Raises WeirError with ONNX Runtime's reason, also where ONNX Runtime itself would silently use the CPU instead.
    """
    path = _file(model)
    session_options = options.session_options(library, describing=describing)
    try:
        # With the fallback it would print to stdout and use the CPU instead of raising.
        session = library.InferenceSession(str(path), session_options, providers=list(providers), enable_fallback=0)
    except WeirError:
        raise
    except Exception as error:
        text = str(error)
        for folder in {str(model.model_directory), str(model.model_directory.resolve())}:
            text = text.replace(folder, model.name)
        raise internal(f"onnx runtime error: {_short(text)}") from error
    wanted = [name for name, _ in providers]
    got = list(session.get_providers())
    if got[: len(wanted)] != wanted:
        missing = next(name for position, name in enumerate(wanted) if name not in got[: position + 1])
        reason = _cuda_obstacle(library) if missing == CUDA else ""
        raise unavailable(
            f"ONNX Runtime could not use {missing} and would have run model '{model.name}' on {', '.join(got)}"
            f"{f': {reason}' if reason else ''}"
        )
    return session


def run_error(error: Exception) -> WeirError | DeviceLost:
    """The error of a run that raised `error`."""
    text = _short(str(error))
    if (failure := _CUDA_FAILURE.search(text)) is not None and int(failure[1]) in STICKY.values():
        return DeviceLost(text)
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return unavailable(f"onnx runtime error: {text}")
    return internal(f"onnx runtime error: {text}")


def preload_cuda(library: Any) -> None:
    """Loads CUDA's libraries from installed packages. Missing ones are reported when a session is opened."""
    preload = getattr(library, "preload_dlls", None)
    if preload is not None:
        preload()


def _file(model: ModelVersion) -> Path:
    path = model.directory / (model.config.default_model_filename or "model.onnx")
    if path.is_dir():
        path = path / "model.onnx"
    if not path.is_file():
        shown = path.relative_to(model.model_directory.parent)
        raise unavailable(f"unable to find '{shown}' for model instance '{model.name}'")
    return path


def _cuda_obstacle(library: Any) -> str:
    """Why the CUDA provider can't be loaded; ONNX Runtime prints that to stderr only."""
    origin = getattr(library, "__file__", None)
    if origin is None:
        return ""
    for path in (Path(origin).parent / "capi").glob("libonnxruntime_providers_cuda.so"):
        try:
            # Symbols are resolved at their first use, so only missing libraries fail here.
            ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_LAZY)
        except OSError as error:
            return str(error).replace(f"{path.parent}/", "")
    return ""


def _short(text: str) -> str:
    """The message without the host name and source lines that CUDA errors contain."""
    return _BUILD_DETAIL.sub("", text).strip()


NOT_INSTALLED = "the onnxruntime package is not installed: install weir-serve[cpu] or weir-serve[gpu]"

NO_CUDA = "the installed onnxruntime has no CUDA provider: install weir-serve[gpu] in the place of weir-serve[cpu]"

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")


class Installation(NamedTuple):
    """The installed version ("" where no package states it), and whether it has the CUDA provider.

    The library's own list of providers is not used: it has the CUDA provider also where its file is missing. `problem`
    is what is wrong with the installation, "" for nothing.
    """

    version: str
    has_cuda: bool
    problem: str = ""


def installation() -> Installation | None:
    """Inspects the installed packages without importing them; None without ONNX Runtime."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    versions = {name: version for name in _PACKAGES if (version := installed_version(name))}
    problem = ""
    if len(versions) > 1:
        # They overwrite each other's files, and uninstalling one does not repair the other:
        # https://github.com/microsoft/onnxruntime/issues/26996
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
