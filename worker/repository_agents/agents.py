"""`AppliedAgents`: the repository agents in a model's configuration, run in order.

`checksum` is built in. Any other agent is the class `RepositoryAgent` in the file `<name>/agent.py` of the folder
`--repoagent-directory`. Each call of it runs in a process of its own (`weir.worker.repository_agents.runner`), which the
kernel kills when the worker ends, so an agent that crashes or hangs fails one load and holds up nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weir.repository.paths import check_model_name
from weir.runtime.child_processes import run_in_group
from weir.runtime.folders.locked import LockedFolder
from weir.schemas.config.model_config import ModelConfig, RepositoryAgent
from weir.schemas.core.errors import WeirError, internal, invalid
from weir.worker.repository_agents import checksum

logger = logging.getLogger("weir.worker")

AGENT_FILE = "agent.py"
PREFIX = "weir-agent-"
"""The prefix of the folders in which agents put models."""

LOAD_TIMEOUT_S = 600.0
"""How long an agent may take before a load: it may download or decrypt the model."""

UNLOAD_TIMEOUT_S = 30.0

_RUNNER = Path(__file__).with_name("runner.py")
_MAX_LOGGED_LINES = 200


class AppliedAgents:
    """The agents of one load of one model. `path` is the folder to load, as the last agent has left it. Blocking."""

    def __init__(self, model: str, path: Path, config: ModelConfig, directory: Path | None) -> None:
        """Runs all agents. Raises WeirError if one of them fails, after it has asked the others to unload."""
        self.path = path
        self._model = model
        self._config = config
        self._directory = directory
        self._loaded: list[tuple[RepositoryAgent, Path]] = []
        self._folder: LockedFolder | None = None
        agents = [] if config.model_repository_agents is None else config.model_repository_agents.agents
        try:
            for agent in agents:
                self._apply(agent)
        except BaseException:
            self.release()
            raise

    def _apply(self, agent: RepositoryAgent) -> None:
        if agent.name == checksum.NAME:
            checksum.check_sums(self.path, agent.parameters)
            return
        location = self.path
        reply = self._run(agent, location, "load", LOAD_TIMEOUT_S)
        self._loaded.append((agent, location))
        if reply.get("path") is None:
            return
        path = Path(str(reply["path"]))
        if not path.is_absolute() or not path.is_dir():
            raise internal(
                f"repository agent '{agent.name}' returned '{path}', which is not the absolute path of a folder"
            )
        self.path = path

    def release(self) -> None:
        """Tells the agents, last one first, that the model was unloaded, and removes their folders. Logs failures."""
        while self._loaded:
            agent, location = self._loaded.pop()
            try:
                self._run(agent, location, "unload", UNLOAD_TIMEOUT_S)
            except WeirError as error:
                logger.error("repository agent '%s' failed to unload '%s': %s", agent.name, self._model, error.message)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _run(self, agent: RepositoryAgent, location: Path, action: str, timeout_s: float) -> Mapping[str, Any]:
        """Runs one method of an agent. Returns its reply: `path` if the method has returned one."""
        file = find_agent(agent.name, self._directory)
        if self._folder is None:
            self._folder = LockedFolder(PREFIX)
        job = {
            "action": action,
            "agent": str(file),
            "name": self._model,
            "path": str(location),
            "parameters": agent.parameters,
            "config": self._config.model_dump_json(exclude_defaults=True),
            "folder": str(self._folder.path / agent.name),
        }
        try:
            done = run_in_group(
                [sys.executable, "-P", str(_RUNNER)], timeout_s, input=json.dumps(job), stderr=subprocess.PIPE
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise internal(f"repository agent '{agent.name}' failed: {error}") from error
        for line in done.stderr.splitlines()[-_MAX_LOGGED_LINES:]:
            logger.info("repository agent '%s' of '%s': %s", agent.name, self._model, line)
        reply: Any = None
        with contextlib.suppress(ValueError):
            reply = json.loads(done.stdout)
        if not isinstance(reply, dict):
            raise internal(f"repository agent '{agent.name}' ended with status {done.returncode}")
        if "error" in reply:
            raise internal(f"repository agent '{agent.name}': {reply['error']}")
        return reply


def find_agent(name: str, directory: Path | None) -> Path:
    """The file of an agent. Raises WeirError (INVALID_ARG), in Triton's words, where there is none."""
    check_model_name(name)
    file = None if directory is None else directory / name / AGENT_FILE
    if file is None or not file.is_file():
        searched = "no folder: --repoagent-directory is not set" if directory is None else str(directory)
        raise invalid(f"unable to find '{AGENT_FILE}' for repo agent '{name}', searched: {searched}")
    return file
