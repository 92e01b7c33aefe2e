"""The API of Python models, as in Triton: custom metrics, messages, modules in the model's folder.

The messages are those of a running Triton 2.51 for the same requests.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

CODE, R = {"CODE": ("BYTES", [1])}, {"R": ("BYTES", [1])}

SIBLINGS = """
import bus, helper, schemas, worker
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        said = [schemas.WHOSE, worker.WHOSE, bus.WHOSE, helper.WHOSE]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([", ".join(said)], dtype=object))])
            for _ in requests
        ]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("python-api")
    models = folder / "models"
    write_python_model(models, "one", "probe", CODE, R)
    write_python_model(models, "two", "probe", CODE, R, more="instance_group { kind: KIND_CPU count: 2 }")
    write_python_model(models, "gone", "probe", CODE, R)
    siblings = write_python_model(models, "siblings", "probe", CODE, R)
    (siblings / "1" / "model.py").write_text(SIBLINGS)
    for place, name in (("", "schemas"), ("", "worker"), ("1", "bus"), ("1", "helper")):
        whose = f"the {place or 'model'} folder's {name}"
        (siblings / place / f"{name}.py").write_text(f"WHOSE = {whose!r}\n")
    with Server(folder, models, "--model-control-mode=explicit", "--load-model=*") as started:
        yield started


def ask(server: Server, code: str, model: str = "one") -> str:
    with server.http() as client:
        answer = client.infer(model, http_inputs({"CODE": np.array([code.encode()], dtype=object)}))
        return answer.as_numpy("R")[0].decode()


def metrics(server: Server, name: str) -> list[str]:
    with urllib.request.urlopen(f"http://{server.metrics_place}/metrics", timeout=10) as page:
        return [line for line in page.read().decode().splitlines() if line.startswith((name, f"# HELP {name}"))]


FAMILIES = """
MF = pb.MetricFamily
if "counter" not in kept:
    kept["counter"] = MF(name="api_counter", description="a counter", kind=MF.COUNTER)
    kept["gauge"] = MF(name="api_gauge", description="a gauge", kind=MF.GAUGE)
    kept["histogram"] = MF(name="api_histogram", description="a histogram", kind=MF.HISTOGRAM)
counter = kept["counter"].Metric(labels={"b": "2", "a": "1"})
gauge = kept["gauge"].Metric()
histogram = kept["histogram"].Metric(labels={"a": 1}, buckets=[0.5, 2])
"""

INSTANCE = "Failed to process the request for model 'one_0', message: "

REFUSALS = {
    "counter.increment(-1)": "TritonModelException: Failed to increment metric value: "
    + INSTANCE
    + "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
    "counter.set(1)": "TritonModelException: Failed to set metric value: "
    + INSTANCE
    + "TRITONSERVER_METRIC_KIND_COUNTER does not support Set",
    "gauge.observe(1)": "TritonModelException: Failed to observe metric value: "
    + INSTANCE
    + "TRITONSERVER_METRIC_KIND_GAUGE does not support Observe",
    "histogram.increment(1)": "TritonModelException: Failed to increment metric value: "
    + INSTANCE
    + "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment",
    "histogram.set(1)": "TritonModelException: Failed to set metric value: "
    + INSTANCE
    + "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Set",
    "histogram.value()": "TritonModelException: Failed to get metric value: "
    + INSTANCE
    + "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value",
    "MF(name='api_counter', description='', kind=MF.GAUGE)": "TritonModelException: Error when creating MetricFamily: "
    + INSTANCE
    + "Family name already exists with different type",
    "MF(name='', description='', kind=MF.GAUGE)": "TritonModelException: Error when creating MetricFamily: "
    + INSTANCE
    + "Invalid metric name",
    "kept['counter'].Metric(labels={1: 'a'})": "TritonModelException: Error when creating Metric: "
    + INSTANCE
    + "Invalid label name",
    "kept['histogram'].Metric(labels={'x': 'y'}, buckets=[2, 1])": "TritonModelException: Error when creating Metric: "
    + INSTANCE
    + "Bucket Boundaries must be strictly sorted",
    "kept['histogram'].Metric()": "TritonModelException: Failed to create metric. Missing required buckets.",
    "kept['gauge'].Metric(buckets=[1])": "TritonModelException: Failed to create metric. Unexpected buckets found.",
    "kept['gauge'].Metric(labels=[1])": "TritonModelException: Failed to create metric. Labels must be a dictionary.",
    "MF(name='api_x', description='', kind=MF.COUNTER).Metric().increment(1)": "TritonModelException: Failed to increment "
    "metric value: Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' "
    "object should be deleted AFTER its corresponding 'Metric' objects have been deleted.",
    "MF(name='api_x', description='', kind=7)": "TypeError: __init__(): incompatible constructor arguments.",
    "counter.increment('a')": "TypeError: increment(): incompatible function arguments.",
}


class TestMetrics:
    def test_are_on_the_page_when_the_answer_is_there(self, server: Server) -> None:
        reply = ask(
            server,
            FAMILIES + "counter.increment(2.5); gauge.set(7); gauge.increment(-10)\n"
            "for value in (0.25, 0.5, 1, 100): histogram.observe(value)\n"
            "r = [counter.value(), gauge.value()]",
        )
        assert json.loads(reply) == [2.5, -3.0]
        assert metrics(server, "api_counter") == ["# HELP api_counter a counter", 'api_counter{a="1",b="2"} 2.5']
        assert metrics(server, "api_gauge") == ["# HELP api_gauge a gauge", "api_gauge -3"]
        assert metrics(server, "api_histogram") == [
            "# HELP api_histogram a histogram",
            'api_histogram_count{a="1"} 4',
            'api_histogram_sum{a="1"} 101.75',
            'api_histogram_bucket{a="1",le="0.5"} 2',
            'api_histogram_bucket{a="1",le="2"} 3',
            'api_histogram_bucket{a="1",le="+Inf"} 4',
        ]

    def test_refusals(self, server: Server) -> None:
        for code, message in REFUSALS.items():
            assert ask(server, FAMILIES + code).startswith(message), code

    def test_a_family_that_is_deleted_leaves_the_page(self, server: Server) -> None:
        ask(server, "kept['f'] = pb.MetricFamily(name='api_f', description='', kind=pb.MetricFamily.COUNTER)")
        ask(server, "kept['m'] = kept['f'].Metric(); kept['m'].increment(1)")
        assert metrics(server, "api_f") == ["# HELP api_f ", "api_f 1"]
        ask(server, "del kept['m'], kept['f']")
        wait_until(lambda: metrics(server, "api_f") == [])

    def test_instances_share_them_and_one_that_dies_takes_nothing_along(self, server: Server) -> None:
        """A counter is one for both processes, whatever becomes of them."""
        count = (
            "MF = pb.MetricFamily\n"
            "if 'c' not in kept:\n"
            "    kept['c'] = MF(name='api_shared', description='', kind=MF.COUNTER); kept['m'] = kept['c'].Metric()\n"
            "kept['m'].increment(1); r = [os.getpid(), kept['m'].value()]"
        )

        def counted(requests: int) -> set[int]:
            with ThreadPoolExecutor(8) as pool:
                return {
                    json.loads(reply)[0] for reply in pool.map(lambda _: ask(server, count, "two"), range(requests))
                }

        pids = counted(60)
        assert len(pids) == 2
        assert metrics(server, "api_shared ")[1:] == ["api_shared 60"]
        os.kill(min(pids), signal.SIGKILL)
        done = 60
        while len(counted(20) | pids) < 3:
            done += 20
            assert done < 1000
        assert metrics(server, "api_shared ")[1:] == [f"api_shared {done + 20}"]

    def test_of_a_model_that_is_unloaded_are_gone(self, server: Server) -> None:
        code = (
            "kept['f'] = pb.MetricFamily(name='api_gone', description='', kind=pb.MetricFamily.COUNTER)\n"
            "kept['m'] = kept['f'].Metric(); kept['m'].increment(1); r = kept['m'].value()"
        )
        with server.http() as client:
            for _ in range(2):
                assert ask(server, code, "gone") == "1.0"
                assert metrics(server, "api_gone ")[1:] == ["api_gone 1"]
                client.unload_model("gone")
                wait_until(lambda: metrics(server, "api_gone") == [])
                client.load_model("gone")

    def test_a_worker_that_dies_takes_no_counts_along(self, server: Server) -> None:
        """What was last told of them stays in the sum; a gauge's value goes with who wrote it."""
        code = (
            "MF = pb.MetricFamily\n"
            "kept['c'] = MF(name='api_kept_counter', description='', kind=MF.COUNTER); c = kept['c'].Metric()\n"
            "kept['g'] = MF(name='api_kept_gauge', description='', kind=MF.GAUGE); g = kept['g'].Metric()\n"
            "c.increment(3); g.set({})"
        )
        ask(server, code.format(5))
        assert metrics(server, "api_kept")[1::2] == ["api_kept_counter 3", "api_kept_gauge 5"]
        pids = server.pids()
        server.kill("worker")
        wait_until(lambda: server.pids().get("worker", pids["worker"]) != pids["worker"])
        server.wait_ready("one")
        wait_until(lambda: metrics(server, "api_kept_gauge") == [])
        assert metrics(server, "api_kept")[1::2] == ["api_kept_counter 3"]
        ask(server, code.format(6))
        assert metrics(server, "api_kept")[1::2] == ["api_kept_counter 6", "api_kept_gauge 6"]


class TestModules:
    def test_those_of_the_model_s_folders_come_first(self, server: Server) -> None:
        """Also where the server has packages of the same names."""
        said = "the model folder's schemas, the model folder's worker, the 1 folder's bus, the 1 folder's helper"
        assert ask(server, "", "siblings") == said


class TestMessages:
    @pytest.mark.parametrize(
        ("code", "message"),
        [
            (
                "returned = 5",
                "Failed to process the request(s) for model 'one_0', message: "
                "Expected a list in the execute return, found type '<class 'int'>'.",
            ),
            (
                "returned = []",
                "Failed to process the request(s) for model 'one_0', message: Number of InferenceResponse objects do "
                "not match the number of InferenceRequest objects. InferenceRequest(s) size is:1, and "
                "InferenceResponse(s) size is:0",
            ),
            (
                "returned = [1]",
                "Failed to process the request(s) for model 'one_0', message: Expected an 'InferenceResponse' object "
                "in the execute function return list, found type '<class 'int'>'.",
            ),
            (
                "raised = pb.TritonModelException('boo')",
                "Failed to process the request(s) for model 'one_0', message: TritonModelException: boo",
            ),
            ("answer = pb.InferenceResponse(error=pb.TritonError('mine', pb.TritonError.NOT_FOUND))", "mine"),
        ],
    )
    def test_of_what_is_returned_or_raised(self, server: Server, code: str, message: str) -> None:
        with pytest.raises(InferenceServerException) as raised:
            ask(server, code)
        assert raised.value.message().startswith(message)

    @pytest.mark.parametrize(
        ("code", "reply"),
        [
            ("pb.Tensor('', np.zeros(1))", "TritonModelException: Tensor name cannot be an empty string."),
            ("pb.Tensor('A', np.zeros(1, 'c8'))", "TritonModelException: NumPy dtype is not supported."),
            ("pb.triton_string_to_numpy('TYPE_X')", "KeyError: 'TYPE_X'"),
            ("pb.InferenceResponse([None])", "Output tensor for inference response should not be empty."),
            ("request.get_response_sender().send(flags=5)", "Unable to send response. Unsupported flag provided."),
            ("pb.Logger.log('a', 9)", "TypeError: log(): incompatible function arguments."),
            ("r = os.path.basename(pb.get_model_dir())", '"1"'),
            ("r = [os.environ['OMP_NUM_THREADS'], [n for n in os.environ if 'WEIR' in n]]", '["1", []]'),
        ],
    )
    def test_of_the_api(self, server: Server, code: str, reply: str) -> None:
        assert reply in ask(server, code)
