"""The torch library: what is installed of it, and its import, which takes seconds and 200 MB.

Only a worker that loads a model for it imports it, in the thread that loads.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from schemas.errors import unavailable

_NOT_INSTALLED = "the torch package is not installed: install weir-serve[torch]"

lock = threading.RLock()
"""Held while torch is imported, and while a model is loaded: the loader of AOTInductor can't do two at once, and the
filters of warnings are the whole process's."""

_imported: Any = None


def installed_version() -> str:
    """The version of torch, "" where there is none. Imports nothing."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def built_for_cuda() -> str:
    """The CUDA version torch was built for, "" for a build without. Imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    found = re.search(r"^cuda\b.*= *'([^']+)'", text, re.MULTILINE)
    return found[1] if found else ""


def torch_library() -> Any:
    """The module `torch`, set up for serving. Raises WeirError (UNAVAILABLE) where it can't be imported."""
    global _imported
    with lock:
        if _imported is None:
            # Compiled packages read memory that is not theirs when an input has another shape than they were made for.
            # They check that only when they are told to, once, before they are loaded.
            os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
            try:
                import torch
            except ImportError as error:
                text = _NOT_INSTALLED if error.name == "torch" else f"torch can't be imported: {error}"
                raise unavailable(text) from error
            torch.set_num_threads(1)
            _spend_warning(torch)
            _imported = torch
    return _imported


@contextmanager
def without_deprecations_of_jit() -> Iterator[None]:
    """That TorchScript is deprecated is no news to whoever serves it, nor is it his that torch itself still uses it.

    To be entered with `lock` held.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield


def _spend_warning(torch: Any) -> None:
    # Requests lie in memory that is read-only. Torch says once in a process that it knows no such tensors. No model is
    # given one that it could write to (`pytorch_tensors`).
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(bytes(4), np.int32))
