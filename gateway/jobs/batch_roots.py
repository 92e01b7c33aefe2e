"""`BatchRoots`: the folders below which offline jobs may read and write, and nowhere else.

Paths come from clients. They are resolved, links and all, before they are looked at, and once more before a job runs.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.jobs.job_record import MAX_INPUTS, JobSpec
from schemas.errors import invalid

OPTION = "--batch-root"

_PATTERN = frozenset("*?[")


class BatchRoots:
    """See the module. All methods block on the file system."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(root).resolve() for root in roots]

    @property
    def first(self) -> Path | None:
        """The folder in which there is room for what clients send."""
        return self._roots[0] if self._roots else None

    def check_any(self) -> None:
        """Raises WeirError (INVALID_ARG) unless jobs are allowed at all."""
        if not self._roots:
            raise invalid(f"this server runs no offline jobs: start it with {OPTION} FOLDER")

    def checked(self, spec: JobSpec) -> JobSpec:
        """The same with patterns expanded, in order of names. Raises WeirError (INVALID_ARG) for what is not allowed."""
        self.check_any()
        inputs: list[str] = []
        for text in spec.inputs:
            if _PATTERN & set(text) and not Path(text).exists():
                found = self._matches(text)
                if not found:
                    raise invalid(f"no input matches '{text}'")
                inputs += found
            else:
                inputs.append(text)
            if len(inputs) > MAX_INPUTS:
                raise invalid(f"a job takes at most {MAX_INPUTS} input files: name their folder instead of a pattern")
        self.inputs(inputs)
        self.output(spec.output)
        return replace(spec, inputs=tuple(inputs))

    def inputs(self, texts: Iterable[str]) -> list[Path]:
        """Where these inputs lie. Raises WeirError (INVALID_ARG)."""
        paths = []
        for text in texts:
            path = self._inside("input", text)
            if not path.exists():
                raise invalid(f"input '{text}' does not exist")
            paths.append(path)
        return paths

    def output(self, text: str) -> Path:
        """Where this output folder lies, or will lie. Raises WeirError (INVALID_ARG)."""
        path = self._inside("output", text)
        if path in self._roots:
            raise invalid(f"output '{text}' is a {OPTION} itself: name a folder below it")
        if path.exists() and not path.is_dir():
            raise invalid(f"output '{text}' is not a folder")
        return path

    def holds(self, spec: JobSpec) -> bool:
        """Whether the job's files are to be found here, as far as their names tell."""
        places = [*spec.inputs[:1], spec.output]
        return all(any(Path(place).is_relative_to(root) for root in self._roots) for place in map(_real, places))

    def _matches(self, pattern: str) -> list[str]:
        """Nothing outside is looked at, even for names."""
        parts = Path(pattern).parts
        fixed = next(place for place, part in enumerate(parts) if _PATTERN & set(part))
        self._inside("input", str(Path(*parts[:fixed])))
        if ".." in parts[fixed:]:
            raise invalid(f"input '{pattern}' must not have '..' behind a pattern")
        return sorted(glob.glob(pattern, recursive=True))

    def _inside(self, what: str, text: str) -> Path:
        if not Path(text).is_absolute() or "\0" in text:
            raise invalid(f"{what} '{text}' is not an absolute path")
        try:
            path = Path(text).resolve()
        except (OSError, RuntimeError) as error:  # links in a circle
            raise invalid(f"{what} '{text}' can't be resolved") from error
        if not any(path.is_relative_to(root) for root in self._roots):
            raise invalid(f"{what} '{text}' is not below a folder that the server was started with as {OPTION}")
        return path


def _real(text: str) -> Path:
    try:
        return Path(text).resolve()
    except (OSError, RuntimeError):
        return Path(text)
