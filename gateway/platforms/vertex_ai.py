"""Google Vertex AI's protocol for custom containers, as Triton serves it.

A container has one route for health checks and one for predictions; Vertex AI names them in its environment. Other calls of
the HTTP API go to the prediction route too, with the path of the call in a header.
Source: `vertex_ai_server.cc` of Triton's server, and the answers of a running Triton 2.51.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from weir.calls.catalog import Catalog
from weir.gateway.platforms.frontend import METRICS_PATH, Headers, Target, default_model, header
from weir.schemas.core.errors import invalid
from weir.schemas.core.names import model_path

PREDICT_ROUTE = "AIP_PREDICT_ROUTE"
HEALTH_ROUTE = "AIP_HEALTH_ROUTE"
REDIRECT_HEADER = "X-Vertex-Ai-Triton-Redirect"

_REDIRECT = REDIRECT_HEADER.lower().encode()
_MODEL = r"/v2/models/[^/?#\s]+(?:/versions/[0-9]+)?"
_REGION = r"/v2/(?:system|cuda)sharedmemory(?:/region/[^/?#\s]+)?"
_GET_TARGETS = re.compile(
    rf"{METRICS_PATH}|/v2|/v2/health/(?:live|ready)|/v2/models/stats|{_MODEL}(?:/(?:ready|config|stats))?|{_REGION}/status"
)
_POST_TARGETS = re.compile(
    rf"{_MODEL}/(?:infer|generate|generate_stream)|{_REGION}/(?:register|unregister)|/v2/repository/index"
    r"|/v2/repository/models/[^/?#\s]+/(?:load|unload)"
)

_POST_ONLY = "/v2/models/any/infer"
"""The target of a redirected request that is not a POST: it answers 405, whatever the redirect."""


class VertexAi:
    """The routes of one deployed container. `model` is the default model, "" the only one that is served."""

    service = "Vertex AI"
    door = "vertex"
    media_type = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
    answers_with_media_type = False

    def __init__(self, predict_route: str, health_route: str, model: str, catalog: Catalog) -> None:
        self._predict_route = predict_route
        self._health_route = health_route
        self._model = model
        self._catalog = catalog

    def target(self, method: str, path: str, headers: Headers) -> Target | None:
        """The target of a request; None for an unknown path. Raises WeirError, also for an unknown redirect."""
        if path == self._health_route:
            return Target(method, "/v2/health/ready")
        if path != self._predict_route:
            return None
        redirect = header(headers, _REDIRECT)
        if redirect is None:
            model = default_model(self._catalog, self._model, "--vertex-ai-default-model")
            return Target(method, f"{model_path(model)}/infer")
        if method != "POST":
            return Target(method, _POST_ONLY)
        target = f"/{redirect}"
        if _GET_TARGETS.fullmatch(target):
            return Target("GET", target)
        if _POST_TARGETS.fullmatch(target):
            return Target("POST", target)
        raise invalid(
            f"{REDIRECT_HEADER}: '{redirect}' is not the path of a call that a Vertex AI request can be redirected to: "
            "v2/models/NAME/infer is one"
        )

    def application(self, _path: str) -> None:
        """None: every request has a target."""
        return


def read_routes(environment: Mapping[str, str]) -> tuple[str, str]:
    """(prediction route, health route) in the environment of a container. Raises ValueError where one is missing."""
    for name in (PREDICT_ROUTE, HEALTH_ROUTE):
        if not environment.get(name):
            raise ValueError(
                f"failed to start Vertex AI service: {name} is not defined for Vertex AI endpoint; Vertex AI sets it in "
                "the container, set it to a path such as /predict or /health elsewhere"
            )
    return environment[PREDICT_ROUTE], environment[HEALTH_ROUTE]
