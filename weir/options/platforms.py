"""What the containers of managed services set in the environment of `weir serve`, as options.

Vertex AI starts a container without arguments that would name its port; a container for SageMaker passes two variables on
to the options. Options on the command line win. Source: `command_line_parser.cc` of Triton's server, and the script `serve`
of its SageMaker container.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def platform_arguments(environment: Mapping[str, str]) -> list[str]:
    """Arguments of `weir serve` that precede the user's."""
    arguments: list[str] = []
    if environment.get("AIP_MODE") == "PREDICTION":
        arguments += ["--allow-vertex-ai=true", "--allow-http=false", "--allow-grpc=false"]
    for variable, option in _VARIABLES.items():
        if environment.get(variable):
            arguments.append(f"{option}={environment[variable]}")
    return arguments


_VARIABLES = {
    "AIP_HTTP_PORT": "--vertex-ai-port",
    "SAGEMAKER_BIND_TO_PORT": "--sagemaker-port",
    "SAGEMAKER_SAFE_PORT_RANGE": "--sagemaker-safe-port-range",
}


def platform_repositories(values: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The repository of a server that was given none: that of its model on Vertex AI."""
    uri = environment.get("AIP_STORAGE_URI", "") if values["allow_vertex_ai"] else ""
    return (uri,) if uri else ()
