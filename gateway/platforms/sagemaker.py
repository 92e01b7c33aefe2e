"""Amazon SageMaker's protocol for containers, as Triton serves it: one model, or many
(`weir.gateway.platforms.multi_model`).

Source: `sagemaker_server.cc` of Triton's server, and the answers of a running Triton 2.51.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from starlette.types import ASGIApp

from weir.calls.catalog import Catalog
from weir.gateway.platforms.frontend import Headers, Target, default_model, header
from weir.gateway.platforms.multi_model import TARGET_HEADER, MultiModel, status_of
from weir.schemas.core.names import model_path

DEFAULT_MODEL = "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
PING_MODE = "SAGEMAKER_TRITON_PING_MODE"
INFERENCE_TYPE = "SAGEMAKER_TRITON_INFERENCE_TYPE"
ROOT = "WEIR_SAGEMAKER_ROOT"
DEFAULT_ROOT = Path("/opt") / "ml" / "models"
"""Where SageMaker unpacks the archives of models."""

_PING_MODES = ("ready", "live")
_INFERENCE_TYPES = ("infer", "generate", "generate_stream")
_INVOKE = re.compile(r"/models/([^/]+)/invoke")
_TARGET = TARGET_HEADER.lower().encode()


class SageMakerOptions(NamedTuple):
    """What the environment of a container decides: the default model ("": the only one), what its routes do, and the folder
    of the models that SageMaker loads.
    """

    model: str = ""
    ping_mode: str = "ready"
    inference_type: str = "infer"
    root: Path = DEFAULT_ROOT

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SageMakerOptions:
        """The options in an environment. Raises ValueError for one that has no such value."""
        return cls(
            environment.get(DEFAULT_MODEL, ""),
            _one_of(environment, PING_MODE, _PING_MODES),
            _one_of(environment, INFERENCE_TYPE, _INFERENCE_TYPES),
            Path(environment.get(ROOT) or DEFAULT_ROOT),
        )


class SageMaker:
    """`GET /ping`, `POST /invocations`, and `/models` for models that SageMaker loads."""

    service = "SageMaker"
    door = "sagemaker"
    media_type = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    answers_with_media_type = True

    def __init__(self, options: SageMakerOptions, catalog: Catalog, models: MultiModel | None = None) -> None:
        self._options = options
        self._catalog = catalog
        self._models = models
        self._app: ASGIApp | None = None

    def target(self, method: str, path: str, headers: Headers) -> Target | None:
        """The target of a request; None for an unknown path. Raises WeirError."""
        if path == "/ping":
            return Target(method, f"/v2/health/{self._options.ping_mode}")
        if path == "/invocations":
            model = default_model(self._catalog, self._options.model, DEFAULT_MODEL)
            return Target(method, f"{model_path(model)}/{self._options.inference_type}")
        invoked = _INVOKE.fullmatch(path) if method == "POST" and self._models is not None else None
        if invoked is not None and self._models is not None:
            registered = self._models.model_of(unquote(invoked[1]))
            model = header(headers, _TARGET) or registered
            return Target(method, f"{model_path(model)}/infer", status_of)
        return None

    def application(self, path: str) -> ASGIApp | None:
        """The application that answers `path` itself: that of `/models`."""
        if self._app is None and self._models is not None:
            self._app = self._models.app()
        return self._app if path == "/models" or path.startswith("/models/") else None


def _one_of(environment: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = environment.get(name) or allowed[0]
    if value not in allowed:
        raise ValueError(
            f"failed to start SageMaker service: {name} is '{value}', expected one of {', '.join(allowed)}"
        )
    return value
