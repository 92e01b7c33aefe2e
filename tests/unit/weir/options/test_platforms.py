"""What the containers of managed services set becomes options, which the command line overrides."""

from __future__ import annotations

import pytest

from weir.options import SERVE, UsageError, options_of
from weir.options.platforms import platform_arguments, platform_repositories


def test_nothing_is_set_elsewhere() -> None:
    assert platform_arguments({}) == []
    assert platform_arguments({"AIP_MODE": "TRAINING", "AIP_HTTP_PORT": ""}) == []


def test_on_vertex_ai_its_frontend_replaces_the_others() -> None:
    assert platform_arguments({"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "8081"}) == [
        "--allow-vertex-ai=true",
        "--allow-http=false",
        "--allow-grpc=false",
        "--vertex-ai-port=8081",
    ]


def test_sagemaker_s_ports() -> None:
    assert platform_arguments({"SAGEMAKER_BIND_TO_PORT": "8443", "SAGEMAKER_SAFE_PORT_RANGE": "1-2"}) == [
        "--sagemaker-port=8443",
        "--sagemaker-safe-port-range=1-2",
    ]


def test_the_repository_of_vertex_ai() -> None:
    environment = {"AIP_STORAGE_URI": "gs://bucket/model"}
    assert platform_repositories({"allow_vertex_ai": True}, environment) == ("gs://bucket/model",)
    assert platform_repositories({"allow_vertex_ai": False}, environment) == ()
    assert platform_repositories({"allow_vertex_ai": True}, {}) == ()


def test_a_range_of_ports() -> None:
    option = options_of(SERVE)["sagemaker_safe_port_range"]
    assert option.read("8081-9000") == (8081, 9000)
    assert option.written((8081, 9000)) == ["--sagemaker-safe-port-range=8081-9000"]
    with pytest.raises(UsageError, match=r"requires format <first>-<second>. Found: nope"):
        option.read("nope")
    for text in ("9000-8081", "1-65536", "-1-2"):
        with pytest.raises(UsageError):
            option.read(text)
