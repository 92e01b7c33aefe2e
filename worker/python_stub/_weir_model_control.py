"""Changes of the model repository by a model, and questions about it: `load_model`, `unload_model`, `is_model_ready`."""

from __future__ import annotations

from typing import Any

from _weir_call_limits import MAX_FILES_BYTES
from _weir_calls import current_calls
from _weir_channel import Kind
from _weir_errors import TritonModelException

_FILE = "file:"


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Loads a model, or loads it again, and returns when it serves; for servers in explicit mode.

    `config` is a configuration in JSON that stands in for the one on disk; `files` stand in for the model's folder, each
    under "file:" and its path there. Raises TritonModelException with the server's reason.
    """
    _check("load_model", "(model_name: str, config: str = '', files: object = None) -> None", model_name, config)
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    contents: dict[str, bytes] = {}
    for name, content in (files or {}).items():
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise TypeError(f"files must be bytes by path, found {type(content)} by {type(name)}")
        if not name.startswith(_FILE):
            raise TritonModelException(
                f"Failed to load model: failed to load '{model_name}', the name of file '{name}' does not begin with "
                f"'{_FILE}'"
            )
        contents[name.removeprefix(_FILE)] = content
    size_bytes = sum(map(len, contents.values()))
    if size_bytes > MAX_FILES_BYTES:
        raise TritonModelException(
            f"Failed to load model: failed to load '{model_name}', files of {size_bytes} bytes are more than "
            f"{MAX_FILES_BYTES}"
        )
    _ask("load model", Kind.LOAD, model_name, config or None, contents)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unloads a model; returns when no version of it takes new requests. For servers in explicit mode.

    With `unload_dependents` the models that were loaded for its sake alone go too. Raises TritonModelException with the
    server's reason.
    """
    _check("unload_model", "(model_name: str, unload_dependents: bool = False) -> None", model_name)
    _ask("unload model", Kind.UNLOAD, model_name, bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a version of a model ("" for any) can be asked. Raises TritonModelException for what is no version."""
    _check("is_model_ready", "(model_name: str, model_version: str = '') -> bool", model_name, model_version)
    return bool(_ask("check model readiness", Kind.IS_MODEL_READY, model_name, model_version))


def _check(function: str, signature: str, *texts: Any) -> None:
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"{function}(): incompatible function arguments. The following argument types are supported:\n"
            f"    1. {signature}\n\nInvoked with: {', '.join(map(repr, texts))}"
        )


def _ask(what: str, kind: Kind, *arguments: Any) -> Any:
    calls = current_calls()
    if not calls.controls_models:
        raise TritonModelException(f"Failed to {what}: it is possible in 'initialize' and 'execute' only")
    try:
        return calls.ask(kind, *arguments)
    except TritonModelException as error:
        raise TritonModelException(f"Failed to {what}: {error}") from None
