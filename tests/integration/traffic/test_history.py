"""The history of models: what clients have changed, and the rollback of the last change."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.support.models.zoo import write_versions
from tests.support.servers.weir_server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose models are loaded on request."""
    folder = tmp_path_factory.mktemp("history")
    (folder / "models").mkdir()
    for name in ("loads", "splits", "mixed"):
        write_versions(folder / "models", name, "version_policy { all { } }")
    with Server(folder, folder / "models", "--model-control-mode=explicit") as server:
        yield server


def ask(server: Server, method: str, path: str, document: Any = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    headers = {"Weir-By": "ann@desk"}
    request = urllib.request.Request(f"http://{server.http_place}/v2/models/{path}", body, headers, method=method)
    with urllib.request.urlopen(request, timeout=40) as answer:
        return json.loads(answer.read())


def changes(server: Server, model: str) -> list[dict[str, Any]]:
    return list(ask(server, "GET", f"{model}/history")["changes"])


def kinds(server: Server, model: str) -> list[str]:
    return [change["kind"] for change in changes(server, model)]


def test_loads_and_unloads_are_recorded_and_undone(server: Server) -> None:
    with server.http() as client:
        client.load_model("loads")
        config = json.dumps({"version_policy": {"specific": {"versions": [1]}}, "backend": "onnxruntime"})
        client.load_model("loads", config=config)
        client.unload_model("loads")
    unload, override, load = changes(server, "loads")
    assert [row["kind"] for row in (unload, override, load)] == ["unload", "load", "load"]
    assert load["load_before"] == {}
    assert load["load_after"] == override["load_before"] == {"load": True}
    assert override["load_after"] == unload["load_before"] == {"load": True, "config": config}
    assert load["by"] == "http 127.0.0.1"

    found = ask(server, "POST", "loads/rollback")
    assert (found["undone"]["number"], found["now"]) == (unload["number"], {"load": unload["load_before"]})
    assert json.loads(server.get("/v2/models/loads")[1])["versions"] == ["1"], "with the configuration of the load"
    assert ask(server, "POST", "loads/rollback")["undone"]["number"] == override["number"]
    assert json.loads(server.get("/v2/models/loads")[1])["versions"] == ["1", "2", "3"]
    assert ask(server, "POST", "loads/rollback")["undone"]["number"] == load["number"]
    assert not server.is_ready("loads")
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, "POST", "loads/rollback")
    assert "has no change to roll back" in json.loads(caught.value.read())["error"]
    assert kinds(server, "loads")[:3] == ["rollback"] * 3


def test_changes_of_the_traffic_rule_are_recorded_and_undone(server: Server) -> None:
    with server.http() as client:
        client.load_model("splits")
    ask(server, "PUT", "splits/traffic", {"weights": {"1": 90, "2": 10}})
    ask(server, "PUT", "splits/traffic", {"weights": {"2": 1}, "sticky": "header:x-user"})
    ask(server, "DELETE", "splits/traffic")
    newest = changes(server, "splits")[0]
    assert (newest["kind"], newest["by"]) == ("traffic", "ann@desk (http 127.0.0.1)")
    assert newest["traffic_before"] == {"weights": {"2": 1.0}, "sticky": "header:x-user"}
    assert newest["traffic_after"] == {}
    assert ask(server, "POST", "splits/rollback")["now"] == {"traffic": newest["traffic_before"]}
    shown = ask(server, "GET", "splits/traffic")
    assert (shown["weights"], shown["sticky"]) == ({"2": 1}, "header:x-user")
    ask(server, "POST", "splits/rollback")
    assert ask(server, "GET", "splits/traffic")["weights"] == {"1": 90, "2": 10}
    ask(server, "POST", "splits/rollback")
    assert ask(server, "GET", "splits/traffic")["source"] == "none"
    assert server.is_ready("splits")


def test_a_rollback_that_lacks_the_state_before_is_refused(server: Server) -> None:
    with server.http() as client:
        client.load_model("mixed")
        client.load_model("mixed")
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, "POST", "mixed/rollback")
    assert "earlier files are not kept" in json.loads(caught.value.read())["error"]
    assert server.is_ready("mixed")


def test_a_load_that_failed_is_recorded_with_its_error(server: Server) -> None:
    with server.http() as client:
        client.load_model("mixed")
        with pytest.raises(InferenceServerException):
            client.load_model("mixed", config="{ not JSON")
    newest = changes(server, "mixed")[0]
    assert newest["kind"] == "load"
    assert newest["error"]


def test_the_history_is_limited(server: Server) -> None:
    assert len(ask(server, "GET", "splits/history?limit=2")["changes"]) == 2
    with pytest.raises(urllib.error.HTTPError):
        ask(server, "GET", "splits/history?limit=all")
