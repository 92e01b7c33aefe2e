"""Sessions: opened from a model's file, on the providers that were asked for and no others; and their errors."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.errors import WeirError, internal, unavailable
from worker.backend import DeviceLost, ModelVersion
from worker.backends.onnxruntime_options import OnnxOptions
from worker.backends.onnxruntime_providers import CUDA, Provider

_CUDA_FAILURE = re.compile(r"CUDA (?:failure|error) (\d+)")
_STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, *range(714, 722), 999})
"""The `cudaError_t` after which the process can use the device no more."""

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
    """An `InferenceSession` on just these providers.

    Raises WeirError with ONNX Runtime's reason, also where it would have gone on with the CPU alone without raising.
    """
    path = _file(model)
    session_options = options.session_options(library, describing=describing)
    try:
        # Without the fallback it raises, where it otherwise prints to stdout and takes the CPU.
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
    """What a run that raised `error` fails with."""
    text = _short(str(error))
    if (failure := _CUDA_FAILURE.search(text)) is not None and int(failure[1]) in _STICKY:
        return DeviceLost(text)
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return unavailable(f"onnx runtime error: {text}")
    return internal(f"onnx runtime error: {text}")


def preload_cuda(library: Any) -> None:
    """Finds the libraries of CUDA that are installed as packages; what is missing is told when a session is opened."""
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
    """Why the provider can't be loaded: ONNX Runtime says so on stderr only."""
    origin = getattr(library, "__file__", None)
    if origin is None:
        return ""
    for path in (Path(origin).parent / "capi").glob("libonnxruntime_providers_cuda.so"):
        try:
            # Calls into the runtime are looked up when they are made, so only libraries can be missing.
            ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_LAZY)
        except OSError as error:
            return str(error).replace(f"{path.parent}/", "")
    return ""


def _short(text: str) -> str:
    """Without the host's name and the source lines that failures of CUDA bring along."""
    return _BUILD_DETAIL.sub("", text).strip()
