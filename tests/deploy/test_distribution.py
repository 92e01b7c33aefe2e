"""The wheel and the sdist hold the product and nothing else, and an installed wheel serves without a checkout.

They are built here from a copy of the source tree; `make dist` has those in `dist/` checked, which `WEIR_DIST` names.
"""

from __future__ import annotations

import email
import email.message
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.deploy.compose_project import ROOT
from tests.support.models.zoo import config_text, write_identity, write_model
from tests.support.servers.demo import demo_served
from weir import __version__
from weir.console.npm.copy_files import FILES, LICENSES

LINKED = {name.name: f"weir/{name.name}" for name in (ROOT / "weir").iterdir() if name.is_symlink()}
"""Folders of the root that the wheel has below `weir`."""

NOT_SHIPPED = ("weir/console/npm/",)
"""It copies the web files into a checkout."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WEB_FILES = {
    *(f"{folder}/{Path(file).name}" for file, folder in FILES.items()),
    *(f"{folder}/{file.replace('/', '-')}" for file, folder in LICENSES.items()),
}


class Distribution(NamedTuple):
    """A built wheel and sdist."""

    wheel: Path
    sdist: Path

    def wheel_names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def of_dist_info(self, name: str) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(f"weir_serve-{__version__}.dist-info/{name}").decode()

    def metadata(self) -> email.message.Message:
        return email.message_from_string(self.of_dist_info("METADATA"))


def source_files() -> set[str]:
    """The files of the checkout that git has or would add, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}


def git_archive(folder: Path, kind: str) -> Path:
    """An archive in `folder` of the files that `source_files` names, as git writes it of a commit."""
    variables = {
        **os.environ,
        "GIT_INDEX_FILE": str(folder / "index"),
        "GIT_OBJECT_DIRECTORY": str(folder / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": git("rev-parse", "--path-format=absolute", "--git-path", "objects"),
    }
    (folder / "objects").mkdir()
    git("add", "--all", **variables)
    path = folder / f"archive.{kind}"
    git("archive", "--output", str(path), git("write-tree", **variables), **variables)
    return path


def git(*words: str, **variables: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, env=variables or None, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def copy_web_files(source: Path) -> None:
    """What `make install` adds to a checkout, as far as it is here."""
    for name in WEB_FILES:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)


def build(source: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", folder, source]
    return subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """What `make dist` built, or what is built here from an archive by git: the sdist, and from it the wheel."""
    folder = Path(os.environ.get("WEIR_DIST", ""))
    if not os.environ.get("WEIR_DIST"):
        source = tmp_path_factory.mktemp("source")
        archive = git_archive(tmp_path_factory.mktemp("archive"), "tar")
        subprocess.run(["tar", "--extract", "--file", archive, "--directory", source], check=True)
        copy_web_files(source)
        folder = source / "dist"
        assert build(source, folder).returncode == 0
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Distribution(wheel.absolute(), sdist.absolute())


def in_wheel(name: str) -> str:
    """The path in the wheel of a file of the checkout."""
    folder, _, rest = name.partition("/")
    return f"{LINKED[folder]}/{rest}" if folder in LINKED else name


def test_the_files_of_the_wheel_are_those_of_the_packages(built: Distribution) -> None:
    """Equal, so that a new data file that pyproject.toml does not name is noticed here."""
    installed = {in_wheel(name) for name in source_files() | WEB_FILES}
    expected = {name for name in installed if name.startswith("weir/") and not name.startswith(NOT_SHIPPED)}
    shipped = {name for name in built.wheel_names() if ".dist-info/" not in name}
    assert shipped == expected


def test_wheels_from_the_sdist_and_from_the_tree_are_equal(built: Distribution, tmp_path: Path) -> None:
    """`built` has the wheel of the sdist. The tree has the links, and build products beside them."""
    for name in source_files() | WEB_FILES:
        target = tmp_path / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target, follow_symlinks=False)
    for name in LINKED:
        (tmp_path / "tree" / "weir" / name).symlink_to(f"../{name}")
    done = build(tmp_path / "tree", tmp_path / "dist", "--wheel")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert checksums(wheel) == checksums(built.wheel)


def checksums(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def test_an_archive_that_has_lost_the_links_is_rejected_with_the_reason(tmp_path: Path) -> None:
    with zipfile.ZipFile(git_archive(tmp_path, "zip")) as archive:
        archive.extractall(tmp_path / "source")  # writes a link as a file, as others do
    done = build(tmp_path / "source", tmp_path / "dist", "--wheel")
    assert done.returncode != 0
    assert "the links in weir/ are lost, as in an archive of type .zip: clone with git" in done.stdout + done.stderr


def test_the_wheel_installs_one_name(built: Distribution) -> None:
    assert {name.partition("/")[0] for name in built.wheel_names()} == {"weir", f"weir_serve-{__version__}.dist-info"}
    assert "weir/py.typed" in built.wheel_names()


def test_the_sdist_holds_what_builds_the_wheel(built: Distribution) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in built.wheel_names() if ".dist-info/" not in name} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert {name.partition("/")[0] for name in names} & {"tests", "benchmarks", "examples", "docs"} == set()


def test_metadata(built: Distribution) -> None:
    metadata = built.metadata()
    assert metadata["Name"] == "weir-serve"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra", ())) == set(PROJECT["optional-dependencies"])
    assert {line.partition(",")[0] for line in metadata.get_all("Project-URL", ())} == set(PROJECT["urls"])
    assert (ROOT / "LICENSE").read_text() == built.of_dist_info("licenses/LICENSE")
    assert "Tag: py3-none-any" in built.of_dist_info("WHEEL")
    assert "weir = weir.__main__:main" in built.of_dist_info("entry_points.txt")


def test_twine_accepts_both(built: Distribution) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.sdist]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Beside a user's modules that have the names of Weir's packages

STRANGERS = sorted(path.stem for path in (ROOT / "weir").iterdir() if not path.name.startswith(("_", "py")))
"""`bus`, `client`, `schemas`, `worker` and so on."""

TEST_OF_THE_USER = """
import numpy as np
import weir
from weir.testing import run_backend

ROW = np.array([[1, 2, 3]], np.float32)


def test_served_models(weir_server):
    for name in ("plain", "isolated"):
        assert weir_server.infer(name, {"IN": ROW})["OUT"].tolist() == ROW.tolist()
    assert weir_server.infer("python", {"IN": ROW})["OUT"].tolist() == (2 * ROW).tolist()


def test_a_server():
    with weir.Server("models", id="mine") as server:
        assert server.metadata()["name"] == "mine"


def test_a_backend():
    with run_backend("models/plain") as model:
        assert model.infer({"IN": ROW})["OUT"].tolist() == ROW.tolist()
"""

MODEL_OF_THE_USER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", row * 2)]) for row in rows]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a module of each of our packages' names, which nobody may import, and with models and a test."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in STRANGERS:
        (folder / f"{name}.py").write_text(f"raise ImportError('the {name} of the user')\n")
    (folder / "test_mine.py").write_text(TEST_OF_THE_USER)
    models = folder / "models"
    write_identity(models, "plain", "FP32")
    write_identity(models, "isolated", "FP32")
    with (models / "isolated" / "config.pbtxt").open("a") as config:
        config.write('\nparameters { key: "isolation" value { string_value: "process" } }\n')
    tensors = {"IN": ("FP32", [-1])}, {"OUT": ("FP32", [-1])}
    python = write_model(models, "python", config_text("python", "python", *tensors, batch=8))
    (python / "1" / "model.py").write_text(MODEL_OF_THE_USER)
    return folder


@pytest.fixture
def python(built: Distribution, tmp_path: Path) -> Path:
    """A Python that has Weir from the wheel, whose files are those of the checkout."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", packages, built.wheel], check=True)
    # All but Weir is that of this environment, whose own .pth files Python does not read there.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path / "venv" / "bin" / "python"


def read(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=20) as reply:
        content: bytes = reply.read()
    return content


@pytest.mark.timeout(180)
def test_modules_of_the_user_with_our_names_are_not_imported(python: Path, project: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(project)}
    where = [python, "-c", "import weir.gateway.main, weir.worker.main; print(weir.gateway.__file__)"]
    printed = subprocess.run(where, cwd=project, env=environment, check=True, capture_output=True, text=True).stdout
    assert printed.startswith(str(python.parents[1])), printed
    with demo_served(project, "--console-port=0", python=python, path=str(project)) as served:
        http = f"http://127.0.0.1:{served.ports['8000']}"
        labels = read(f"{http}/v2/models/magika/infer", (project / ".weir/demo/request.json").read_bytes())
        assert b"python" in labels
        assert b"weir" in read(f"http://127.0.0.1:{served.ports['8002']}/metrics")
        for page in (
            f"{http}/docs",
            f"{http}/docs/swagger-ui-bundle.js",
            f"{served.console_url}/web/vendor/preact.mjs",
        ):
            assert len(read(page)) > 100, page
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--weir-model-repository=models", "test_mine.py"]
    done = subprocess.run(tests, cwd=project, env=environment, capture_output=True, text=True)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


# In an environment of its own


class Installed(NamedTuple):
    """A fresh environment with the wheel, and an empty folder to work in."""

    python: Path
    weir: Path
    folder: Path

    def environment(self) -> dict[str, str]:
        """Without what would lead to the checkout or to another server."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "PYTHON", "VIRTUAL_ENV", "NATS_"))}
        return {**kept, "XDG_DATA_HOME": str(self.folder), "TMPDIR": str(self.folder)}

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=120
        )


@pytest.fixture(scope="module")
def installed(built: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel with the extra of the demo, installed as the page has it, in the versions of the lock."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    constraints = folder / "constraints.txt"
    locked = re.findall(r"^[\w.-]+==[^\\\n]+", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    constraints.write_text("".join(f"{line.strip()}\n" for line in locked))
    scripts = folder / "venv" / "bin"
    (folder / "work").mkdir()
    one = Installed(scripts / "python", scripts / "weir", folder / "work")
    page = (ROOT / "docs" / "installation.md").read_text()
    (documented,) = re.findall(r"^pip install '\.\[demo\]'$", page, re.MULTILINE)
    words = shlex.split(documented.replace(".[", f"{built.wheel}["))
    done = one.run(one.python, "-m", *words, "--quiet", "--disable-pip-version-check", "--constraint", constraints)
    assert done.returncode == 0, done.stderr
    return one


@pytest.fixture
def served(installed: Installed) -> Iterator[dict[str, str]]:
    """The addresses of `weir serve` with one model, by protocol. It must stop cleanly."""
    models = installed.folder / "models"
    models.mkdir()
    write_identity(models, "identity", "FP32")
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    with (installed.folder / "log").open("w") as log:
        process = subprocess.Popen(
            [installed.weir, "serve", f"--model-repository={models}", *ports],
            cwd=installed.folder,
            env=installed.environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    rows: list[list[str]] = []
    while (line := process.stdout.readline()) and rows[-1:] != [["identity", "1", "READY"]]:
        rows.append(line.split())
    try:
        assert line, (installed.folder / "log").read_text()
        yield {row[0]: row[1] for row in rows if len(row) == 2}
    finally:
        process.terminate()
        process.stdout.read()
        assert process.wait(60) == 0
        process.stdout.close()


ASK = """
import sys
import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1])
tensor = triton.InferInput("IN", [1, 3], "FP32")
tensor.set_data_from_numpy(np.array([[1, 2, 3]], np.float32))
print(client.infer("identity", [tensor]).as_numpy("OUT").tolist())
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_is_that_of_the_wheel(installed: Installed) -> None:
    assert installed.run(installed.weir, "--version").stdout == f"weir {__version__}\n"
    where = installed.run(installed.python, "-c", "import weir.gateway; print(weir.__file__, weir.gateway.__file__)")
    assert all(str(installed.python.parents[1]) in path for path in where.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_request_of_tritons_client_is_answered(installed: Installed, served: dict[str, str]) -> None:
    asked = installed.run(installed.python, "-c", ASK, served["gRPC"])
    assert asked.stdout == "[[1.0, 2.0, 3.0]]\n", asked.stderr
    status = installed.run(installed.weir, "status", f"--data-dir={served['data']}")
    assert status.stdout.startswith("healthy: 1 host, 1 gateway"), status.stdout + status.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_runs_and_names_the_networks_that_are_left_out(installed: Installed) -> None:
    done = installed.run(installed.weir, "demo", "--seconds=0.1")
    assert done.returncode == 0, done.stderr
    assert "pythonbytecode" in done.stdout or " python " in done.stdout
    assert "Left out, because the package is not installed: silero-vad" in done.stdout
    assert f"{installed.python} -m pip install --no-deps" in done.stdout
    assert "Stopped cleanly" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_doctor_finds_what_the_server_needs(installed: Installed) -> None:
    done = installed.run(installed.weir, "doctor", "--json")
    assert done.returncode in (0, 1), done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["nats-server"]["state"] == "ok"
    assert str(installed.python.parents[1]) in found["nats-server"]["finding"]
