"""The images that tests of containers run: Weir's from its Dockerfile, and those of other programs.

Where a registry is reached, other images are pulled. Else the base image is made by `debootstrap` under the official name,
from Debian's own Python, and nats-server (from PyPI) and HAProxy (from Debian) are built onto it: see `stand_ins/`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.deploy.compose_project import ROOT
from tests.support.deploy.container_engine import Engine, EngineError

DOCKERFILE = ROOT / "compose" / "images" / "Dockerfile"
STAND_INS = Path(__file__).parent / "stand_ins"

_PULL_S = 300.0
_NOT_IN_SLIM_IMAGES = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "var/cache",
    "var/lib/apt/lists",
)


def prepare(engine: Engine, folder: Path, images: Sequence[str]) -> None:
    """Makes sure that the base image of the Dockerfile and `images` (NAME:TAG) are there.

    `folder` keeps the base image as a file. Raises EngineError if neither pulling nor building succeeds.
    """
    base = base_name()
    if not engine.has_image(base) and not _pulled(engine, base):
        _import_base(engine, folder / "base.tar", base)
    for image in images:
        if not engine.has_image(image) and not _pulled(engine, image):
            _build_stand_in(engine, image)


def build_weir(engine: Engine, target: str, image: str) -> str:
    """Builds a target of Weir's Dockerfile as `image`; returns the log of the build."""
    return _build(engine, "--file", str(DOCKERFILE), "--target", target, "--tag", image, str(ROOT))


def base_name() -> str:
    """The image that Weir's images are made of."""
    (name,) = set(re.findall(r"^FROM (\S+:\S+)", DOCKERFILE.read_text(), re.MULTILINE))
    return name


def _pulled(engine: Engine, image: str) -> bool:
    try:
        engine.command("pull", "--quiet", image, timeout_s=_PULL_S)
    except (EngineError, subprocess.TimeoutExpired):
        return False
    return True


def _import_base(engine: Engine, archive: Path, name: str) -> None:
    found = re.fullmatch(r"python:(\d+\.\d+)-slim-(\w+)", name)
    assert found, f"no base image can be made in the place of {name}"
    python, suite = found.groups()
    if not archive.exists():
        _make_base(archive, python, suite)
    path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    engine.command("import", "--change", f"ENV {path}", str(archive), name)


def _make_base(archive: Path, python: str, suite: str) -> None:
    """Writes a Debian with Python and pip at the places where the official image has them."""
    if shutil.which("debootstrap") is None:
        raise EngineError("no registry is reached, and there is no debootstrap to make a base image with")
    with tempfile.TemporaryDirectory(prefix="weir-base-") as folder:
        root = Path(folder)
        _run("debootstrap", "--variant=minbase", f"--include=python{python},ca-certificates", suite, folder)
        for name in ("python", "python3"):
            (root / "usr/local/bin" / name).symlink_to(f"/usr/bin/python{python}")
        (root / f"usr/lib/python{python}/EXTERNALLY-MANAGED").unlink(missing_ok=True)
        _run("pip", "download", "--quiet", "--no-deps", "--dest", str(root / "tmp"), "pip==24.0")
        (wheel,) = (root / "tmp").glob("pip-*.whl")
        in_image = f"/tmp/{wheel.name}"
        _run(
            "chroot", folder, "env", f"PYTHONPATH={in_image}", "python", "-m", "pip", "install", "--no-index", in_image
        )
        wheel.unlink()
        for name in _NOT_IN_SLIM_IMAGES:
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir(parents=True)
        partial = archive.with_suffix(".partial")
        # Without devices, as the official image: the mode of its /dev/shm would become that of a volume mounted there.
        _run("tar", "-C", folder, "--exclude=./dev/*", "-cf", str(partial), ".")
        partial.rename(archive)


def _build_stand_in(engine: Engine, image: str) -> None:
    name, _, tag = image.partition(":")
    dockerfile = STAND_INS / f"{name}.Dockerfile"
    if not dockerfile.exists():
        raise EngineError(f"{image} can't be pulled, and there is no stand-in for it")
    version = re.match(r"[\d.]+\d", tag)
    options = ["--build-arg", f"BASE={base_name()}", "--build-arg", f"VERSION={version[0] if version else ''}"]
    _build(engine, "--file", str(dockerfile), *options, "--tag", image, str(STAND_INS))


def _build(engine: Engine, *words: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        secrets = [f"--secret=id={name},src={path}" for name, path in _secrets(Path(folder)).items()]
        return engine.command("build", "--network", "host", *secrets, *words)


def _secrets(folder: Path) -> dict[str, Path]:
    """The configuration with which this machine reaches its registries, as files for a build: see the Dockerfile."""
    (folder / "pip.conf").write_text(_pip_configuration())
    found = {"pip.conf": folder / "pip.conf"}
    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if certificates and Path(certificates).is_file():
        found["ca-certificates"] = Path(certificates)
    npm = Path(os.environ.get("NPM_CONFIG_USERCONFIG", Path.home() / ".npmrc"))
    if npm.is_file():
        found["npmrc"] = npm
    return found


_OPTIONS = {"index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout"}


def _pip_configuration() -> str:
    """What of pip's configuration says where packages come from. Folders of this machine are none in a container."""
    lines = ["[global]"]
    for line in _run("pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        places = [word for word in value.strip("'\"").split() if not word.startswith(("file:", "/"))]
        if option in _OPTIONS and places:
            lines.append(f"{option} = {' '.join(places)}")
    return "\n".join([*lines, "cert = /etc/ssl/certs/ca-certificates.crt", ""])


def _run(*command: str) -> str:
    words = ["python3", "-m", "pip", *command[1:]] if command[0] == "pip" else list(command)
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise EngineError(
            f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout
