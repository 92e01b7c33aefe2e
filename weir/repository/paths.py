"""Names and paths from callers and configurations, and reading of small files: nothing leads out of a model's folder.

Rejected are names with separators, control characters or only dots, absolute paths, `..`, and links that end outside.

A repository's author may not be the operator of the server. `read_small_file` protects the worker from a file that is
far larger than its kind ever is (a sparse file takes no room on disk), and from a pipe or a device, which would
otherwise take all of its memory or block a loading thread.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path, PurePosixPath

from weir.repository.problems import ConfigProblem
from weir.schemas.core.errors import invalid

_MODEL_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,127}")
_FOR_SHELLS = frozenset(";|&$`<>()[]{}\\\"'*?~#!")
_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")
_LARGEST_VERSION = 2**63 - 1


def check_model_name(name: str) -> None:
    """Raises WeirError(INVALID_ARG) unless `name` may name a model: 1 to 128 letters, digits, `_`, `.`, `-`.

    Such a name is one part of a path, and neither `.` nor `..`. The texts for a blank name, for path characters and for
    characters that mean something to a shell are Triton's.
    """
    if not name.strip():
        raise invalid("Model name cannot be empty. Please enter a valid name to deploy.")
    is_path = "/" in name or name in (".", "..")
    shells = "Invalid stub name: contains invalid characters. " if _FOR_SHELLS & set(name) and not is_path else ""
    if is_path or "\\" in name:
        raise invalid(f"{shells}invalid model name '{name}', model name must not contain path traversal characters")
    if not _MODEL_NAME.fullmatch(name):
        raise invalid(
            f"{shells}invalid model name {name!r}, a model name is 1 to 128 letters, digits, '_', '.' and '-', "
            "and does not begin with '-'"
        )


def is_hidden(name: str) -> bool:
    """Whether a folder of this name is hidden: it is no model's, but that of Git, of Kubernetes or of an editor."""
    return name.startswith(".")


def check_folder_name(name: str) -> None:
    """Raises WeirError(INVALID_ARG) unless a folder of this name in a repository is that of a model."""
    check_model_name(name)
    if is_hidden(name):
        raise invalid(f"invalid model name '{name}', folders whose names begin with '.' are hidden, and no models")


def parse_version(text: str) -> int | None:
    """The version a folder called `text` holds; None when it is not a plain 64-bit number without leading zeros."""
    if not _VERSION.fullmatch(text) or int(text) > _LARGEST_VERSION:
        return None
    return int(text)


def check_relative(filename: str, field: str) -> None:
    """Raises ConfigProblem at `field` when `filename`, as written, would lead out of the folder it is relative to."""
    path = PurePosixPath(filename)
    if path.is_absolute() or ".." in path.parts or "\\" in filename or "\0" in filename:
        raise ConfigProblem(field, f"file '{filename}' must stay within the model's folder")


def path_inside(folder: Path, filename: str, field: str = "") -> Path:
    """The resolved path of `filename` in `folder`; links are followed as long as they end inside the folder.

    Raises ConfigProblem at `field` for a path that leaves it.
    """
    check_relative(filename, field)
    try:
        path = (folder / filename).resolve()
        inside = path.is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # a loop of links; its text would show absolute paths
        raise ConfigProblem(field, f"file '{filename}' can't be resolved") from error
    if not inside:
        raise ConfigProblem(field, f"file '{filename}' must stay within the model's folder")
    return path


def read_labels(model_dir: Path, filename: str) -> list[str]:
    """The labels in `filename` of a model's folder, one per line, in order. Raises ConfigProblem."""
    path = path_inside(model_dir, filename, "label_filename")
    try:
        text = read_small_file(path, MAX_LABELS_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigProblem("label_filename", f"failed to read label file '{filename}': {reason}") from error
    return text.splitlines()


MAX_CONFIG_BYTES = 4 << 20
"""Bytes of a `config.pbtxt`, and of the configuration that a load request brings."""

MAX_LABELS_BYTES = 16 << 20
"""Bytes of a label file."""

MAX_REQUIREMENTS_BYTES = 1 << 20
"""Bytes of a `requirements.txt` of a Python model."""

MAX_TENSOR_FILE_BYTES = 1 << 30
"""Bytes of a file with the content of one tensor: warm-up data, the initial state of sequences."""


def read_small_file(path: Path, limit_bytes: int) -> bytes:
    """The content of the regular file `path`, which may have `limit_bytes` bytes at most.

    Raises OSError; its `strerror` names no path and may be shown to clients. For a larger file it is EFBIG, for a pipe, a
    device or a socket EINVAL. Neither is read.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"the file has {status.st_size} bytes, at most {limit_bytes} are allowed")
        content = bytearray()
        while piece := file.read(limit_bytes + 1 - len(content)):
            content += piece
            if len(content) > limit_bytes:
                raise OSError(errno.EFBIG, f"the file grew beyond {limit_bytes} bytes while it was read")
        return bytes(content)
