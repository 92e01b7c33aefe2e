"""The published contracts: valid documents, complete, and true of the code."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import openapi_spec_validator

from docs import asyncapi, openapi
from tests.support.docs.pages import ROOT
from weir.bus.naming.permissions import PRODUCER, allows, permissions
from weir.gateway.http.openapi.document import without_version
from weir.gateway.http.openapi.operations import OPERATIONS
from weir.gateway.http.openapi.schemas import SCHEMAS

REFERENCE = ROOT / "docs" / "reference"


def test_the_http_api_is_a_valid_openapi_document() -> None:
    openapi_spec_validator.validate(json.loads((REFERENCE / "openapi.json").read_text()))


def test_every_described_operation_is_a_route() -> None:
    routes = {(method, without_version(path)) for method, path in openapi.routes()}
    assert set(OPERATIONS) == routes


def test_every_schema_is_used() -> None:
    used = {name for operation in OPERATIONS.values() for name in (operation.request, operation.response)}
    assert set(SCHEMAS) - used == {"Error"} - used


def test_the_nats_contract_is_a_valid_asyncapi_document() -> None:
    schema = json.loads((Path(__file__).parent / "schemas" / "asyncapi-3.0.0.json").read_text())
    jsonschema.validate(json.loads((REFERENCE / "asyncapi.json").read_text()), schema)


def test_the_nats_contract_uses_subjects_that_a_producer_may_use() -> None:
    producer = permissions()[PRODUCER]
    for name in ("infer", "event", "batch"):
        address = asyncapi.document()["channels"][name]["address"]
        assert allows(producer.publish, address.replace("{model}", "m")), address


def test_headers_of_the_nats_contract_are_those_that_the_code_reads_and_writes() -> None:
    text = "".join(
        path.read_text()
        for package in ("weir/bus", "weir/calls", "weir/durable", "gateway", "schemas")
        for path in (ROOT / package).rglob("*.py")
    )
    named = {
        name
        for message in asyncapi.document()["components"]["messages"].values()
        for name in message["headers"]["properties"]
    }
    assert [name for name in sorted(named) if name.lower() not in text.lower()] == []
