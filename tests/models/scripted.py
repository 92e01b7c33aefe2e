"""Runs the Python code in SCRIPT, which may be a coroutine's, and answers with `repr` of what it returns.

The code is the body of a function of `pb`, `np`, `asyncio`, `threading` and `request`; `asks(model, **arguments)` makes a
request of keyword arrays as inputs, with what begins with an underscore as further arguments. What it raises is told, not
raised.
"""

import asyncio
import runpy
import tempfile
import textwrap
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


def asks(model, **given):
    more = {name[1:]: value for name, value in given.items() if name.startswith("_")}
    inputs = [pb_utils.Tensor(name, array) for name, array in given.items() if not name.startswith("_")]
    return pb_utils.InferenceRequest(model_name=model, inputs=inputs, **more)


def told(response):
    """A response as a plain value: its error's text, or its outputs by name."""
    if response.has_error():
        return response.error().message()
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


class TritonPythonModel:
    async def execute(self, requests):
        return list(await asyncio.gather(*map(self.answer, requests)))

    async def answer(self, request):
        script = pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy()[0].decode()
        scope = {"pb": pb_utils, "np": np, "asyncio": asyncio, "threading": threading, "asks": asks, "told": told}
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
                file.write("async def script(request):\n" + textwrap.indent(textwrap.dedent(script), "    "))
                file.flush()
                module = runpy.run_path(file.name, scope)
            text = repr(await module["script"](request))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([text], np.object_))])
