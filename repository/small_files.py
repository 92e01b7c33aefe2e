"""Reading the small files of a model's folder whole: configurations, labels, requirements, initial states, warm-up data.

A repository's author may not be the operator of the server. A file that is far larger than its kind ever is (a sparse file
takes no room on disk), a pipe, or a device would otherwise take all of the worker's memory, or a loading thread for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

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
