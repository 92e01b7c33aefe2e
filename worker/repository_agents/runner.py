"""Runs one method of a user's repository agent, in a process of its own.

Standard input has the job and standard output gets the reply, both as JSON. What the agent prints goes to standard error.
The process imports nothing of Weir: modules beside the agent's file come first on its path.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

CLASS = "RepositoryAgent"


class Model:
    """The model that an agent is run for.

    `name` is its name, `path` its folder as the agents before this one left it, `parameters` are those of the agent in the
    model's configuration, and `config` is that configuration, in the form of protobuf's JSON.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.name: str = job["name"]
        self.path: str = job["path"]
        self.parameters: dict[str, str] = job["parameters"]
        self.config: dict[str, Any] = json.loads(job["config"])
        self._folder: str = job["folder"]

    def new_folder(self) -> str:
        """A folder for this model, which exists until the model is unloaded. Its contents stay from call to call."""
        os.makedirs(self._folder, exist_ok=True)
        return self._folder


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs the job. Returns the reply: `error`, or the `path` that `load` has returned."""
    file = Path(job["agent"])
    sys.path.insert(0, str(file.parent))
    try:
        spec = importlib.util.spec_from_file_location("repository_agent", file)
        assert spec is not None  # noqa: S101 - a .py file has a loader
        assert spec.loader is not None  # noqa: S101
        module = importlib.util.module_from_spec(spec)
        sys.modules["repository_agent"] = module
        spec.loader.exec_module(module)
        kind = getattr(module, CLASS, None)
        if not isinstance(kind, type) or not callable(getattr(kind, "load", None)):
            return {"error": f"{file.name} has no class '{CLASS}' with a method 'load'"}
        method = getattr(kind(), job["action"], None)
        path = None if method is None else method(Model(job))
        return {} if path is None or job["action"] != "load" else {"path": os.fspath(path)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code; it becomes the reply
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Reads the job, runs it, and writes the reply."""
    replies = os.dup(1)
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    reply = run(job)
    with os.fdopen(replies, "w") as out:
        json.dump(reply, out)


if __name__ == "__main__":
    main()
