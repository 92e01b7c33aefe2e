"""Amazon SageMaker's protocol for containers with one model, as Triton serves it.

Source: `sagemaker_server.cc` of Triton's server, and the answers of a running Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote

from client.catalog import Catalog
from gateway.platforms.frontend import Headers, Target, default_model

DEFAULT_MODEL = "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
PING_MODE = "SAGEMAKER_TRITON_PING_MODE"
INFERENCE_TYPE = "SAGEMAKER_TRITON_INFERENCE_TYPE"

_PING_MODES = ("ready", "live")
_INFERENCE_TYPES = ("infer", "generate", "generate_stream")


class SageMakerOptions(NamedTuple):
    """What the environment of a container decides: the default model ("": the only one), and what its routes do."""

    model: str = ""
    ping_mode: str = "ready"
    inference_type: str = "infer"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SageMakerOptions:
        """The options in an environment. Raises ValueError for one that has no such value."""
        return cls(
            environment.get(DEFAULT_MODEL, ""),
            _one_of(environment, PING_MODE, _PING_MODES),
            _one_of(environment, INFERENCE_TYPE, _INFERENCE_TYPES),
        )


class SageMaker:
    """`GET /ping` and `POST /invocations`."""

    service = "SageMaker"
    media_type = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    answers_with_media_type = True

    def __init__(self, options: SageMakerOptions, catalog: Catalog) -> None:
        self._options = options
        self._catalog = catalog

    def target(self, method: str, path: str, _headers: Headers) -> Target | None:
        """The target of a request; None for an unknown path. Raises WeirError."""
        if path == "/ping":
            return Target(method, f"/v2/health/{self._options.ping_mode}")
        if path == "/invocations":
            model = default_model(self._catalog, self._options.model, DEFAULT_MODEL)
            return Target(method, f"/v2/models/{quote(model)}/{self._options.inference_type}")
        return None


def _one_of(environment: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = environment.get(name) or allowed[0]
    if value not in allowed:
        raise ValueError(
            f"failed to start SageMaker service: {name} is '{value}', expected one of {', '.join(allowed)}"
        )
    return value
