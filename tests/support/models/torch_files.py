"""Small PyTorch models, written by the tests because compiled ones are bound to the machine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weir.bus.payloads.arena import PayloadReader
from weir.repository.config_text import config_from_dict
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import Tensor, name_of_numpy
from weir.worker.backend_api.interface import Execution, Instance, InstanceDevice, ModelVersion
from weir.worker.backends.pytorch.backend import PyTorchBackend


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppresses torch's deprecation warnings while a test writes a model; serving must not cause any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def config(name: str = "m", inputs: str = "x:FP32:4", outputs: str = "y:FP32:4", **fields: Any) -> ModelConfig:
    """A configuration; tensors are `name:datatype:dims`, several with spaces between."""
    rows = {
        "input": [_tensor(text) for text in inputs.split()],
        "output": [_tensor(text) for text in outputs.split()],
    }
    parameters = {key: {"string_value": str(value)} for key, value in fields.pop("parameters", {}).items()}
    given = {"name": name, "backend": "pytorch", "max_batch_size": 8, "parameters": parameters, **rows, **fields}
    return config_from_dict(given)


def _tensor(text: str) -> dict[str, Any]:
    name, datatype, dims = text.split(":")
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": [int(dim) for dim in dims.split(",")]}


def version(folder: Path, of: ModelConfig) -> ModelVersion:
    """Version 1 of a model whose file the test writes into `folder`/1."""
    (folder / "1").mkdir(exist_ok=True)
    return ModelVersion(of.name, 1, folder, of)


def script(folder: Path, module: Any, name: str = "model.pt") -> None:
    """Writes TorchScript."""
    import torch

    (folder / "1").mkdir(exist_ok=True)
    with without_warnings():
        made = module if isinstance(module, torch.jit.ScriptModule) else torch.jit.script(module.eval())
        made.save(str(folder / "1" / name))


def export(folder: Path, module: Any, arguments: tuple[Any, ...], most: int = 16, **options: Any) -> Any:
    """Writes a program of torch.export whose first dimensions go from 1 to `most`; returns it."""
    import torch

    batch = torch.export.Dim("batch", min=1, max=most)
    keywords = options.pop("kwargs", {})
    shapes = options.pop("dynamic_shapes", tuple({0: batch} for _ in arguments))
    program = torch.export.export(module.eval(), arguments, keywords, dynamic_shapes=shapes)
    (folder / "1").mkdir(exist_ok=True)
    torch.export.save(program, str(folder / "1" / options.pop("name", "model.pt2")))
    return program


def request(*, outputs: tuple[str, ...] = (), **arrays: np.ndarray) -> InferRequest:
    """A request with these inputs."""
    inputs = [Tensor.from_numpy(name, array, name_of_numpy(array.dtype) or "") for name, array in arrays.items()]
    return InferRequest("m", inputs=inputs, outputs=[RequestedOutput(name) for name in outputs])


@contextlib.contextmanager
def instance_of(model: ModelVersion, kind: str = "KIND_CPU", backend: Any = None) -> Iterator[Instance]:
    """One instance of the model."""
    loaded = (backend or PyTorchBackend()).load(model)
    instance = loaded.create_instance(InstanceDevice(kind, 0, f"{model.name}_0"))
    try:
        yield instance
    finally:
        instance.close()
        loaded.unload()


def run(instance: Instance, *requests: InferRequest) -> list[dict[str, np.ndarray]]:
    """The outputs of each request, by name. Raises the first error."""
    results = instance.execute(requests, Execution(PayloadReader()))
    for result in results:
        assert result is not None
        if result.error is not None:
            raise result.error
    return [{tensor.name: tensor.to_numpy().copy() for tensor in result.outputs} for result in results if result]
