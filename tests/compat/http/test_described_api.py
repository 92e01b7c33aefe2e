"""Random requests, made from `/openapi.json`: each response is one that the document describes, and nothing breaks.

The requests are schemathesis's: valid and invalid ones for each operation. Its plugin for pytest is switched off
(`addopts`), because it costs each test run half a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.models import zoo
from tests.support.models.http import serving, write
from tests.support.servers.weir_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

REQUESTS = 24
"""For each operation and each mode. All of them take about a minute."""

CHECKS = (status_code_conformance, content_type_conformance, response_schema_conformance)

TRITONS_500 = re.compile(
    r"failed to parse the request JSON buffer|attempt to |[Uu]nable to parse |Unable to open shared memory region"
    "|unexpected error on creating Triton parameter"
)
"""Errors of requests that have status 500 in Triton, and therefore here: bodies that are no JSON or have wrong types, and
regions that do not exist."""


def write_models(root: Path) -> None:
    zoo.write_add_sub(root)
    zoo.write_classes(root)
    zoo.write_shapes(root)
    zoo.write_identity(root, "text", "BYTES")
    write(root, "letters", "letters", {"TEXT": ("BYTES", [1])}, {"LETTER": ("BYTES", [1])}, 0, DECOUPLED)


DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("described"), write_models, options=["--allow-client-shm=true"]) as started:
        yield started


@pytest.fixture(scope="module")
def operations(server: Server) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"http://{server.http_place}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_responses_are_as_described(server: Server, operations: list[Any], mode: GenerationMode) -> None:
    pids, failures = server.pids(), {}
    for operation in operations:
        try:
            send_requests(operation, mode)
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # an operation without parameters and body takes anything
        except BaseExceptionGroup as group:
            failures[operation.label] = "\n".join(map(str, group.exceptions))
        except AssertionError as error:
            failures[operation.label] = str(error)
    assert not failures, "\n\n".join(f"{label}: {text}" for label, text in failures.items())
    assert server.pids() == pids, "a role has died"
    assert server.is_ready()
    assert "Traceback" not in server.log()


def send_requests(operation: Any, mode: GenerationMode) -> None:
    """Sends requests for one operation. Raises the failures of the first response that is not as described."""

    @settings(
        max_examples=REQUESTS,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        database=None,
    )
    @given(operation.as_strategy(generation_mode=mode), st.sampled_from(["", "add_sub", "classes", "letters"]))
    def send(case: Any, model: str) -> None:
        if model and isinstance(case.path_parameters, dict) and "model" in case.path_parameters:
            case.path_parameters["model"] = model  # a random name is that of no model
        response = case.call(timeout=20)
        case.validate_response(response, checks=CHECKS)
        if response.status_code == 500:
            text = response.text
            assert case.method in ("POST", "PUT"), text
            assert TRITONS_500.search(text), text

    send()
