"""Ramps of a real server: one reaches its goal though the process that runs it is killed, and one goes back."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tests.support.models.zoo import write_python_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

REQUEST = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [0]}]})
CLIENTS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model whose version 2 is as good as version 1, and one whose version 2 fails 20 % of its requests."""
    folder = tmp_path_factory.mktemp("ramps")
    (folder / "models").mkdir()
    for name, percent in (("good", 0), ("bad", 20)):
        parameters = f'parameters {{ key: "fails_percent" value {{ string_value: "{percent}" }} }}'
        more = f"version_policy {{ all {{ }} }}\ndynamic_batching {{ }}\n{parameters}"
        tensors = {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])}
        model = write_python_model(folder / "models", name, "fails_sometimes", *tensors, 8, more)
        shutil.copytree(model / "1", model / "2")
    with Server(folder, folder / "models") as server:
        yield server


def ask(server: Server, method: str, path: str, document: Any = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(f"http://{server.http_place}/v2/models/{path}", body, method=method)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


@contextmanager
def traffic(server: Server, model: str) -> Iterator[Counter[str]]:
    """Sends requests to the model all the time, and counts the answers by version; failures under `failed`."""
    over, counts = threading.Event(), Counter[str]()

    def run() -> None:
        with closing(http.client.HTTPConnection(server.http_place)) as client:
            while not over.is_set():
                client.request("POST", f"/v2/models/{model}/infer", REQUEST)
                response = client.getresponse()
                reply = json.loads(response.read())
                counts[reply["model_version"] if response.status == 200 else "failed"] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(run) for _ in range(CLIENTS)]
        try:
            yield counts
        finally:
            over.set()
    for client in clients:
        client.result()


def ramp(server: Server, model: str) -> dict[str, Any]:
    return dict(ask(server, "GET", f"{model}/traffic")["ramp"])


def ramp_notes(server: Server, model: str) -> list[str]:
    """The notes of the steps of ramps, newest first."""
    return [row["note"] for row in ask(server, "GET", f"{model}/history")["changes"] if row["kind"] == "ramp"] or [""]


def test_a_good_version_reaches_the_goal_though_the_process_that_runs_the_ramp_is_killed(server: Server) -> None:
    ask(server, "PUT", "good/traffic", {"weights": {"1": 100}})
    with traffic(server, "good") as counts:
        started = ask(server, "POST", "good/traffic/ramp", {"version": 2, "over_s": 4.5, "abort_if": "error_rate>1%"})
        assert started["ramp"]["state"] == "running"
        assert started["weights"] == {"1": 99, "2": 1}
        wait_until(lambda: ramp(server, "good")["step"] >= 2, 60)
        server.kill("durable")
        wait_until(lambda: ramp(server, "good")["state"] == "done", 60)
    server.wait_ready()
    assert ask(server, "GET", "good/traffic")["weights"] == {"1": 0, "2": 100}
    assert counts["2"] > 0
    assert counts["failed"] == 0
    notes = wait_until(lambda: found if (found := ramp_notes(server, "good"))[0] == "reached 100 %" else None)
    assert notes[1] == "step to 100 %"
    assert len(notes) == 9
    assert "weir_traffic_ramp_state{" in server.metrics_page()
    assert "the ramp of model good to version 2 reached 100 %" in server.log()


def test_a_bad_version_goes_back_by_itself(server: Server) -> None:
    ask(server, "PUT", "bad/traffic", {"weights": {"1": 100}})
    with traffic(server, "bad") as counts:
        ask(server, "POST", "bad/traffic/ramp", {"version": 2, "over_s": 900, "abort_if": "error_rate>1% or p99>50x"})
        wait_until(lambda: ramp(server, "bad")["state"] == "aborted", 100)
    assert "requests failed, more than 1" in ramp(server, "bad")["reason"]
    assert ask(server, "GET", "bad/traffic")["weights"] == {"1": 100}
    assert 0 < counts["failed"] < 40
    wait_until(lambda: ramp_notes(server, "bad")[0].startswith("went back: "))
    assert "went back" in server.log()
    # A ramp that went back is one change: its rollback does not open version 2 again.
    found = ask(server, "POST", "bad/rollback")
    assert found["undone"]["note"].startswith("ramp of version 2")
    assert found["now"] == {"traffic": {"weights": {"1": 100.0}}}
    assert ask(server, "GET", "bad/traffic")["weights"] == {"1": 100}


def test_a_change_of_the_rule_ends_the_ramp(server: Server) -> None:
    ask(server, "PUT", "good/traffic", {"weights": {"1": 100}})
    ask(server, "POST", "good/traffic/ramp", {"version": 2, "over_s": 900})
    shown = ask(server, "PUT", "good/traffic", {"weights": {"1": 70, "2": 30}})
    assert "ramp" not in shown
    assert shown["weights"] == {"1": 70, "2": 30}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"version": 2}, "over_s must be"),
        ({"version": 0, "over_s": 5}, "version must be"),
        ({"version": 2, "over_s": 5, "to": 101}, "to must be"),
        ({"version": 2, "over_s": 5, "abort_if": "it is bad"}, "is not a condition"),
        ({"version": 2, "over_s": 5, "other": 1}, "expected a JSON object"),
        ({"version": 7, "over_s": 5}, "version 7 of model 'good' is not ready"),
        ({"version": 1, "over_s": 5}, "has no rule in which another version than 1"),
    ],
)
def test_an_invalid_ramp_is_rejected(server: Server, document: Any, problem: str) -> None:
    ask(server, "PUT", "good/traffic", {"weights": {"1": 100}})
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, "POST", "good/traffic/ramp", document)
    assert problem in json.loads(caught.value.read())["error"]
