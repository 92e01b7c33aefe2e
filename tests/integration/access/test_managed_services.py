"""The ports of managed services obey the policy as the HTTP port does, and tell strangers nothing of what is served."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.access.served import Guarded, infer_body
from tests.support.models.zoo import write_identity

POLICY = """
roles:
  anonymous: {rules: [{actions: [health]}]}
  caller: {rules: [{model: open, actions: [infer]}]}
  nothing: {}
"""


ROUTES = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("services")
    for name in ("open", "secret"):
        write_identity(folder / "models", name, "FP32")
    ports = (
        "--allow-sagemaker",
        "--sagemaker-port=0",
        "--allow-vertex-ai",
        "--vertex-ai-port=0",
        "--vertex-ai-default-model=open",
    )
    with Guarded(folder, folder / "models", POLICY, *ports, environment=ROUTES) as server:
        yield server


def asked(url: str, key: str = "") -> tuple[int, str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(url, json=infer_body(), headers=headers, timeout=30.0)
    return answer.status_code, answer.text


def test_sagemaker_tells_nobody_how_many_models_there_are(server: Guarded) -> None:
    url = server.printed_value("SageMaker") + "/invocations"
    status, text = asked(url)
    assert status == 401
    assert "served" not in text
    caller, nothing = server.new_key("a", "caller"), server.new_key("b", "nothing")
    assert asked(url, nothing)[0] == 403
    assert "2 are served" in asked(url, caller)[1]  # whoever may ask some model is told what to name
    assert httpx.get(server.printed_value("SageMaker") + "/ping").status_code == 200


def test_vertex_ai_asks_about_its_default_model(server: Guarded) -> None:
    url = server.printed_value("Vertex AI") + ROUTES["AIP_PREDICT_ROUTE"]
    caller, nothing = server.new_key("c", "caller"), server.new_key("d", "nothing")
    assert [asked(url, key)[0] for key in ("", nothing, caller)] == [401, 404, 200]
