"""Priorities, queue policies and deadlines of the dynamic batcher, as callers see them.

The responses are those of Triton 2.51, except that requests that time out are answered immediately.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models.gated import gate, write_gated_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

LEVELS = 2**64 - 1
EXPIRED = ("UNAVAILABLE", "Request timeout expired")
FULL = ("UNAVAILABLE", "Exceeds maximum queue size")

STRATEGY = """
class BatchStrategy:
    def __init__(self, config):
        self.most = int(config["parameters"]["most"]["string_value"])

    def begin(self):
        return []

    def include(self, request, batch):
        batch.append(request.batch_size)
        return len(batch) <= self.most
"""
MOST = 'parameters { key: "most" value { string_value: "3" } }'
ELSEWHERE = 'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "%s" } }'


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("policies")
    (models := folder / "models").mkdir()
    timeout = "default_timeout_microseconds: %d allow_timeout_override: true timeout_action: %s"
    write_gated_model(models, "full", "default_queue_policy { max_queue_size: 2 }")
    write_gated_model(models, "rejecting", f"default_queue_policy {{ {timeout % (200_000, 'REJECT')} }}")
    write_gated_model(models, "patient", f"default_queue_policy {{ {timeout % (600_000_000, 'REJECT')} }}")
    write_gated_model(models, "delaying", f"default_queue_policy {{ {timeout % (10_000_000, 'DELAY')} }}")
    write_gated_model(
        models,
        "levels",
        f"""
        priority_levels: {LEVELS} default_priority_level: {2**63} default_queue_policy {{ {timeout % (0, "REJECT")} }}
        priority_queue_policy {{ key: {LEVELS} value {{ max_queue_size: 1 }} }}
    """,
    )
    strategic = write_gated_model(models, "strategic", "", 8, MOST + ELSEWHERE % "own/say.py")
    (strategic / "own").mkdir()
    (strategic / "own" / "say.py").write_text(STRATEGY)
    raising = write_gated_model(models, "raising", "", 8)
    (raising / "1" / "batchstrategy.py").write_text(STRATEGY.replace("return len(batch) <=", "return batch <="))
    with Server(folder, models) as started:
        yield started
        assert started.in_flight() == 0


@pytest.fixture
def grpc(policies: Server) -> Iterator[Any]:
    with policies.grpc() as client:
        yield client


def failures(server: Server, model: str) -> dict[str, int]:
    """Failed requests by reason, of the metrics; and as the statistics count them."""
    page = urllib.request.urlopen(f"http://{server.metrics_place}/metrics").read().decode()
    counts = {}
    for line in page.splitlines():
        if line.startswith("nv_inference_request_failure{") and f'model="{model}"' in line and not line.endswith(" 0"):
            counts[line.partition('reason="')[2].partition('"')[0]] = int(float(line.rpartition(" ")[2]))
    with server.http() as client:
        stats = client.get_inference_statistics(model)["model_stats"][0]["inference_stats"]
    assert stats["fail"].get("count", 0) == sum(counts.values())
    return counts


def test_a_full_queue_refuses_and_does_not_count_it_as_a_failure(policies: Server, grpc: Any) -> None:
    with gate(policies, grpc, "full") as gated:
        waiting = [gated.ask(), gated.ask()]
        gated.wait_queued()
        assert gated.ask().refusal == FULL
        with policies.http() as client:
            assert ask_http(policies, "full") == (503, {"error": FULL[1]})
            assert client.is_server_live()
        waiting[0].cancel()
        gated.wait_queued()
        waiting.append(gated.ask())
        gated.wait_queued()
        gated.open()
    assert [asked.output("BATCH") for asked in waiting[1:]] == [1, 1]
    assert failures(policies, "full") == {"CANCELED": 1}


def test_timed_out_requests_are_refused_while_every_instance_is_busy(policies: Server, grpc: Any) -> None:
    with gate(policies, grpc, "rejecting") as gated:
        late, large = gated.ask(), gated.ask(timeout=600_000_000)
        assert [asked.refusal for asked in (late, large)] == [EXPIRED] * 2, "a timeout is never longer than the default"
        assert min(late.took_s, large.took_s) >= 0.2
        in_time = gated.ask()
        gated.wait_queued()
        gated.open()
    assert in_time.output("BATCH") == 1
    assert failures(policies, "rejecting") == {"REJECTED": 2}


def test_a_request_may_have_a_shorter_timeout_than_the_default(policies: Server, grpc: Any) -> None:
    with gate(policies, grpc, "patient") as gated:
        waiting, small = gated.ask(), gated.ask(timeout=50_000)
        assert small.refusal == EXPIRED
        assert small.took_s >= 0.05
        assert not waiting.is_over
        gated.open()
    assert failures(policies, "patient") == {"REJECTED": 1}


def test_timed_out_requests_run_last_where_they_are_delayed(policies: Server, grpc: Any) -> None:
    with gate(policies, grpc, "delaying") as gated:
        first, hasty, third = gated.ask(), gated.ask(timeout=1_000), gated.ask()
        gated.wait_queued()
        time.sleep(0.01)  # that is what is tested: the timeout passes
        fourth = gated.ask()
        gated.wait_queued()
        gated.open()
    turns = [asked.output("TURN") for asked in (first, third, fourth, hasty)]
    assert turns == sorted(turns)
    assert failures(policies, "delaying") == {}


def test_priorities_are_strict_among_any_number_of_levels(policies: Server, grpc: Any) -> None:
    with gate(policies, grpc, "levels") as gated:
        asked = {
            "lowest": gated.ask(priority=LEVELS),
            "default": gated.ask(),
            "below": gated.ask(priority=2**63 + 1),
            "second": gated.ask(priority=2),
            "out of range": gated.ask(priority=0, timeout=1),
            "highest": gated.ask(priority=1, timeout=1),
        }
        gated.wait_queued()
        assert gated.ask(priority=LEVELS).refusal == FULL, "that level has room for one"
        gated.open()
    turns = {name: one.output("TURN") for name, one in asked.items()}
    assert sorted(turns, key=turns.__getitem__) == ["highest", "second", "default", "out of range", "below", "lowest"]
    # Without a default timeout those of requests are not looked at.
    assert failures(policies, "levels") == {}


# Deadlines


def ask_http(server: Server, model: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """(status, body) of an infer request."""
    connection = http.client.HTTPConnection(*server.http_place.split(":"), timeout=20)
    body = {"inputs": [{"name": "VALUE", "shape": [1, 1], "datatype": "INT64", "data": [1]}]}
    connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body), headers or {})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def unix_ms(in_s: float) -> str:
    return str(int((time.time() + in_s) * 1000))


def test_a_request_is_refused_in_the_queue_when_its_deadline_passes(policies: Server, grpc: Any) -> None:
    before = failures(policies, "strategic").get("REJECTED", 0)
    with gate(policies, grpc, "strategic") as gated:
        deadline_ms = unix_ms(0.15)
        assert ask_http(policies, "strategic", {"Weir-Deadline-Ms": deadline_ms}) == (503, {"error": EXPIRED[1]})
        assert int(unix_ms(0)) >= int(deadline_ms)
        assert ask_http(policies, "strategic", {"weir-deadline-ms": "1"}) == (503, {"error": EXPIRED[1]})
        gated.open()
    assert failures(policies, "strategic")["REJECTED"] == before + 2


def test_the_time_a_grpc_call_has_is_its_deadline(policies: Server, grpc: Any) -> None:
    with gate(policies, grpc, "strategic") as gated:
        late = gated.ask(client_timeout=0.1)
        # The client's own clock runs out at the same moment.
        assert late.refusal in {("DEADLINE_EXCEEDED", "Deadline Exceeded"), EXPIRED}
        gated.wait_queued()
        gated.open()


def test_a_running_model_is_told_that_nobody_waits_any_more(policies: Server) -> None:
    connection = http.client.HTTPConnection(*policies.http_place.split(":"), timeout=20)
    body = {"inputs": [{"name": "VALUE", "shape": [1, 1], "datatype": "INT64", "data": [-1]}]}
    headers = {"Weir-Deadline-Ms": unix_ms(0.3)}
    connection.request("POST", "/v2/models/full/infer", json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert {output["name"]: output["data"] for output in answer["outputs"]}["CANCELLED"] == [1]


@pytest.mark.parametrize("value", ["", "soon", "-5", "0", "1.5", "9" * 30])
def test_a_deadline_that_is_none_is_refused(policies: Server, value: str) -> None:
    status, body = ask_http(policies, "full", {"Weir-Deadline-Ms": value})
    assert status == 400
    assert body["error"].startswith("Unable to parse Weir-Deadline-Ms")


# A model's own say in its batches


def test_a_model_decides_by_a_file_of_its_own_what_shares_a_batch(policies: Server, grpc: Any) -> None:
    with gate(policies, grpc, "strategic") as gated:
        asked = [gated.ask() for _ in range(7)]
        gated.wait_queued()
        gated.open()
    assert [one.output("BATCH") for one in asked] == [3, 3, 3, 3, 3, 3, 1]


def test_a_strategy_that_fails_harms_nobody(policies: Server, grpc: Any) -> None:
    with gate(policies, grpc, "raising") as gated:
        asked = [gated.ask() for _ in range(7)]
        gated.wait_queued()
        gated.open()
    assert sum(one.output("BATCH") == 7 for one in asked) == 7
    wait_until(lambda: "batches are formed by the default rule" in policies.log())
