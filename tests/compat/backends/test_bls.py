"""Calls of Python models to other models ("BLS") and to the repository, also when processes die."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clients.stock import http_inputs
from tests.support.models.calling import MODELS, run, write_models
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.schemas.core.errors import ErrorCode

DOUBLES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("O", r.inputs()[0].as_numpy() * 2)]) for r in requests]
"""
DOUBLES_CONFIG = {
    "backend": "python",
    "input": [{"name": "I", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "O", "data_type": "TYPE_FP32", "dims": [-1]}],
}
NOT_READY = (
    "Model {0} - Error when running inference: Failed for execute the inference request. Model '{0}' is not ready."
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bls")
    (models := folder / "models").mkdir()
    write_models(models)
    with Server(
        folder, models, "--model-control-mode=explicit", *(f"--load-model={name}" for name in MODELS)
    ) as started:
        yield started


class TestOneResponse:
    def test_exec(self, server: Server) -> None:
        assert run(server, "return told(asks('same', IN=np.float32([1, 2])).exec())") == {"IN_OUT": [1.0, 2.0]}

    def test_only_what_was_asked_for(self, server: Server) -> None:
        script = """
            arrays = dict(IN=np.float32([1]), WORDS=np.array(["a", b"\\xff"], np.object_))
            response = asks("same", **arrays, _requested_output_names=["WORDS_OUT", "WORDS_OUT"]).exec()
            missing = pb.get_output_tensor_by_name(response, "IN_OUT")
            return told(response), missing, response.has_error(), response.parameters()
        """
        assert run(server, script) == ({"WORDS_OUT": [b"a", b"\xff"]}, None, False, "{}")

    def test_many_at_once(self, server: Server) -> None:
        script = """
            calls = [asks("same", IN=np.float32([n])).async_exec() for n in range(50)]
            return [told(response)["IN_OUT"][0] for response in await asyncio.gather(*calls)]
        """
        assert run(server, script) == [float(n) for n in range(50)]

    def test_from_threads(self, server: Server) -> None:
        script = """
            got = {}
            def ask(n):
                got[n] = told(asks("same", IN=np.full(20_000 * (n % 2) + 1, n, np.float32)).exec())["IN_OUT"][-1]
            threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            return sorted(got.items())
        """
        assert run(server, script) == [(n, float(n)) for n in range(16)]

    @pytest.mark.parametrize("elements", [16_384, 16_385, 262_144])
    def test_large_tensors(self, server: Server, elements: int) -> None:
        # Twice, and looked at after the second: what has come stays as it was.
        script = f"""
            first = asks("same", IN=np.arange({elements}, dtype=np.float32)).exec()
            second = await asks("same", IN=np.zeros({elements}, np.float32)).async_exec()
            array = pb.get_output_tensor_by_name(first, "IN_OUT").as_numpy()
            array[0] += 0
            good = (array == np.arange({elements})).all() and not second.output_tensors()[0].as_numpy().any()
            return bool(good), array.shape
        """
        assert run(server, script) == (True, (elements,))

    def test_large_strings(self, server: Server) -> None:
        script = """
            words = np.array([b"x" * 1000, "gr\\u00fcn", b""] * 100, np.object_)
            once = asks("same", WORDS=words).exec().output_tensors()[0]
            again = asks("same", WORDS=once.as_numpy()).exec().output_tensors()[0]
            return again.as_numpy().tolist() == [b"x" * 1000, "gr\\u00fcn".encode(), b""] * 100
        """
        assert run(server, script) is True

    def test_models_that_ask_models(self, server: Server) -> None:
        script = """
            inner = asks("relay", IN=np.arange(30_000, dtype=np.float32), _parameters={"way": "same"}).exec()
            return told(inner)["IN_OUT"][-1]
        """
        assert run(server, script) == 29_999.0
        deep = (
            """asks("script", SCRIPT=np.array(["return told(asks('same', IN=np.float32([7])).exec())"], np.object_))"""
        )
        assert run(server, f"return told(await {deep}.async_exec())") == {"TOLD": [b"{'IN_OUT': [7.0]}"]}

    def test_what_the_asked_model_sees(self, server: Server) -> None:
        script = """
            sees = "r = request; return r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters()"
            more = dict(_request_id="me", _correlation_id="nine", _flags=3, _timeout=5000000)
            more["_parameters"] = {"a": 1, "b": True}
            memory = pb.PreferredMemory(pb.TRITONSERVER_MEMORY_CPU, 0)
            asked = asks("script", SCRIPT=np.array([sees], np.object_), _preferred_memory=memory, **more)
            return told(await asked.async_exec())["TOLD"][0]
        """
        assert run(server, script) == b"""('me', 'nine', 3, 5000000, '{"a": 1, "b": true}')"""

    def test_a_trace_goes_on_in_the_asked_model(self, server: Server) -> None:
        script = f"""
            sees = np.array(["return request.trace().get_context()"], np.object_)
            place = pb.InferenceTrace('{{"traceparent":"00-{"ab" * 16}-{"cd" * 8}-01"}}')
            own = await asks("script", SCRIPT=sees, _trace=request.trace()).async_exec()
            return told(await asks("script", SCRIPT=sees, _trace=place).async_exec()), told(own)
        """
        context = f"""'{{"traceparent":"00-{"ab" * 16}-{"cd" * 8}-01"}}'"""
        assert run(server, script) == ({"TOLD": [context.encode()]}, {"TOLD": [b"None"]})

    def test_sequences(self, server: Server) -> None:
        script = """
            sums = []
            for value, flags in ((5, 1), (6, 0), (7, 2)):
                for sequence in (8, 9):
                    more = dict(_correlation_id=sequence, _flags=flags)
                    response = asks("sum", INPUT=np.int32([[value * sequence]]), **more).exec()
                    sums.append(told(response)["OUTPUT"][0][0])
            return sums
        """
        assert run(server, script) == [40, 45, 88, 99, 144, 162]

    def test_statistics_are_the_asked_models(self, server: Server) -> None:
        with server.http() as client:
            before = client.get_inference_statistics("same")["model_stats"][0]["inference_count"]
            run(server, "return [asks('same', IN=np.float32([n])).exec().has_error() for n in range(3)]")
            assert client.get_inference_statistics("same")["model_stats"][0]["inference_count"] == before + 3

    def test_outer_requests_at_once(self, server: Server) -> None:
        def relayed(number: int) -> float:
            with server.http() as client:
                inputs = http_inputs({"IN": np.full(number * 2000 + 1, number, np.float32)})
                return float(client.infer("relay", inputs, parameters={"way": "same"}).as_numpy("IN_OUT")[-1])

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(relayed, range(16))) == [float(number) for number in range(16)]


class TestErrors:
    @pytest.mark.parametrize(
        ("call", "code", "text"),
        [
            ("asks('nope', IN=np.float32([1]))", "NOT_FOUND", NOT_READY.format("nope")),
            ("asks('same', IN=np.float32([1]), _model_version=7)", "NOT_FOUND", NOT_READY.format("same")),
            (
                "asks('same', IN=np.int32([1]))",
                "INVALID_ARG",
                "Model same - Error when running inference: [request id: <id_unknown>] inference input 'IN' data-type is "
                "'INT32', but model 'same' expects 'FP32'",
            ),
            (
                "asks('same', NO=np.float32([1]), _request_id='me')",
                "INVALID_ARG",
                "Model same - Error when running inference: unexpected inference input 'NO' for model 'same'",
            ),
            (
                "pb.InferenceRequest(model_name='same', inputs=[pb.Tensor('IN', np.float32([1]))] * 2)",
                "INVALID_ARG",
                "Model same - Error when running inference: [request id: <id_unknown>] input 'IN' already exists in "
                "request",
            ),
            (
                "asks('repeat', IN=np.int32([1]), DELAY=np.uint32([0]), WAIT=np.uint32([0]))",
                "UNSUPPORTED",
                "Model repeat - Error when running inference: Model repeat is using the decoupled. The current BLS "
                "request call doesn't support models using the decoupled transaction policy. Please use "
                "'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models.'",
            ),
        ],
    )
    def test_refusals_are_responses(self, server: Server, call: str, code: str, text: str) -> None:
        script = f"""
            response, later = {call}.exec(), await {call}.async_exec()
            (streamed,) = {"[response]" if "repeat" in call else f"{call}.exec(decoupled=True)"}
            assert later.error().message() == streamed.error().message() == response.error().message()
            return response.error().code() == pb.TritonError.{code}, response.error().message()
        """
        assert run(server, script) == (True, text)

    def test_of_the_asked_model(self, server: Server) -> None:
        script = """
            response = asks("relay", IN=np.float32([1]), _parameters={"way": "nope"}).exec()
            outputs = response.output_tensors(), pb.get_output_tensor_by_name(response, "IN_OUT")
            raised = asks("relay", IN=np.float32([1])).exec().error().message()
            return response.error().message(), outputs, raised.splitlines()[0]
        """
        raised = "Failed to process the request(s) for model 'relay_0', message: KeyError: 'way'"
        assert run(server, script) == (NOT_READY.format("nope"), ([], None), raised)

    def test_of_the_kind_that_is_raised(self, server: Server) -> None:
        script = """
            def tried(call):
                try: call()
                except Exception as error: return f"{type(error).__name__}: {error}".splitlines()[0]
            return [
                tried(lambda: request.exec()),
                tried(lambda: asks("same", _parameters={"much": 1 << 70}).exec()),
                tried(lambda: threading.Thread(target=print).start() or asks("same", _inputs=[None])),
            ]
        """
        received, unpackable, twice = run(server, script)
        assert received.startswith("TritonModelException: a received request")
        assert unpackable.startswith("TritonModelException: Expect parameters values of type int to have 64 bits")
        assert twice.startswith("TypeError")
        # And the model goes on.
        assert run(server, "return told(asks('same', IN=np.float32([1])).exec())") == {"IN_OUT": [1.0]}


REPEATS = """
            def repeats(n, ms=0):
                values = dict(IN=np.arange(n, dtype=np.int32), DELAY=np.full(n, ms, np.uint32), WAIT=np.uint32([0]))
                return asks("repeat", **values)
"""


class TestDecoupled:
    def test_iteration(self, server: Server) -> None:
        script = f"""
            {REPEATS}
            responses = repeats(4).exec(decoupled=True)
            first = told(next(responses))
            rest = [told(response).get("OUT") for response in responses]
            again = [told(response).get("OUT") for response in responses]
            async_ones = [told(response).get("OUT") async for response in await repeats(3).async_exec(decoupled=True)]
            return first, rest, again, async_ones, [told(response) for response in repeats(0).exec(decoupled=True)]
        """
        rest = [[1], [2], [3], None]
        assert run(server, script) == ({"OUT": [0], "IDX": [0]}, rest, [[0], *rest], [[0], [1], [2], None], [{}])

    def test_of_a_model_that_is_not(self, server: Server) -> None:
        script = "return [told(r) for r in asks('same', IN=np.float32([4])).exec(decoupled=True)]"
        assert run(server, script) == [{"IN_OUT": [4.0]}]

    def test_streams_at_once(self, server: Server) -> None:
        script = f"""
            {REPEATS}
            async def stream(n):
                return [told(r).get("OUT") async for r in await repeats(n, 1).async_exec(decoupled=True)]
            return [len(got) for got in await asyncio.gather(*map(stream, range(10)))]
        """
        assert run(server, script) == list(range(1, 11))

    @pytest.mark.parametrize("more", [0, 3], ids=["a model that stops", "a model that goes on"])
    def test_cancel(self, server: Server, more: int) -> None:
        """The stream goes on to the end that its model makes, which sees that it is cancelled."""
        script = f"""
            responses = asks("until_cancelled", MORE=np.int32([{more}])).exec(decoupled=True)
            numbers, code = [], None
            for response in responses:
                if response.has_error():
                    code = response.error().code()
                    break
                numbers += told(response).get("OUT", [])
                if len(numbers) == 5: responses.cancel()
            responses.cancel()
            return numbers == list(range(len(numbers))), len(numbers) >= 5 + {more}, code
        """
        assert run(server, script) == (True, True, ErrorCode.CANCELLED.number if more == 0 else None)

    def test_cancel_before_the_first_response(self, server: Server) -> None:
        script = """
            slow = np.array(["await asyncio.sleep(0.2)"], np.object_)
            responses = asks("script", SCRIPT=slow).exec(decoupled=True)
            responses.cancel()
            return [response.error().code() for response in responses]
        """
        assert run(server, script) == [ErrorCode.CANCELLED.number]

    def test_a_dropped_iterator(self, server: Server) -> None:
        script = f"""
            {REPEATS}
            dropped = repeats(3).exec(decoupled=True)
            del dropped
            return len(list(repeats(3).exec(decoupled=True)))
        """
        assert run(server, script) == 4

    def test_a_cancelled_await_gives_up(self, server: Server) -> None:
        script = """
            slow = np.array(["await asyncio.sleep(0.2)"], np.object_)
            try: await asyncio.wait_for(asks("script", SCRIPT=slow).async_exec(), 0.05)
            except asyncio.TimeoutError: return told(await asks("script", SCRIPT=slow).async_exec())
        """
        assert run(server, script) == {"TOLD": [b"None"]}


class TestRepository:
    def test_readiness(self, server: Server) -> None:
        script = "return [pb.is_model_ready(*a) for a in (('same',), ('same', '1'), ('same', '2'), ('nope',), ('',))]"
        assert run(server, script) == [True, True, False, False, False]
        said = run(server, "pb.is_model_ready('same', 'x')")
        head, _, reason = said.partition("', message: ")
        start = (
            "TritonModelException: Failed to check model readiness: Failed to process the request for model 'script_"
        )
        assert head.startswith(start)
        assert reason == (
            "failed to get model version from specified version string 'x' (details: stol), version should be an integral "
            "value > 0"
        )

    def test_loads_and_unloads(self, server: Server) -> None:
        script = """
            ready = [pb.is_model_ready("spare")]
            pb.load_model("spare")
            ready.append(pb.is_model_ready("spare"))
            answer = told(asks("spare", IN=np.float32([3]), _parameters={"way": "same"}).exec())
            pb.unload_model("spare", unload_dependents=True)
            pb.unload_model("nope")
            return ready, answer, pb.is_model_ready("spare"), told(asks("spare", IN=np.float32([3])).exec())
        """
        assert run(server, script) == ([False, True], {"IN_OUT": [3.0]}, False, NOT_READY.format("spare"))

    def test_a_load_with_files(self, server: Server) -> None:
        script = f"""
            source, config = {DOUBLES.encode()!r}, {json.dumps(DOUBLES_CONFIG)!r}
            pb.load_model("made", config=config, files={{"file:1/model.py": source}})
            doubled = told(asks("made", I=np.float32([3])).exec())
            pb.unload_model("made")
            return doubled
        """
        assert run(server, script) == {"O": [6.0]}

    def test_refusals(self, server: Server) -> None:
        said = run(server, "pb.load_model('nope')")
        assert said.startswith(
            "TritonModelException: Failed to load model: Failed to process the request for model 'script_"
        )
        assert said.endswith("', message: failed to load 'nope', failed to poll from model repository")
        assert run(server, "pb.load_model('same', files=3)") == (
            "TritonModelException: failed to load model 'same', files should be a dictionary of file paths and file "
            "contents"
        )


class TestDeath:
    """A model is asked that tells who runs it, and takes its time the first time."""

    @pytest.mark.parametrize("which", [0, 1], ids=["of the asking model's process", "of the asked model's process"])
    def test_what_died_is_done_again(self, server: Server, tmp_path: Path, which: int) -> None:
        reply = tmp_path / "told"
        script = f"""
            inner = '''
                import os, time
                with open({str(reply)!r}, "a") as file: print(os.getpid(), file=file)
                time.sleep(20 if len(open({str(reply)!r}).readlines()) < 3 else 0)
                return 7
            '''
            import os
            with open({str(reply)!r}, "a") as file: print(os.getpid(), file=file)
            return told(await asks("script", SCRIPT=np.array([inner], np.object_)).async_exec())
        """
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(run(server, script)))
        asking.start()
        pids = wait_until(lambda: reply.exists() and len(lines := reply.read_text().split()) == 2 and lines)
        os.kill(int(pids[which]), signal.SIGKILL)
        if which == 0:
            # What it asked for is given up, but runs on: its instance is wanted for the second attempt.
            os.kill(int(pids[1]), signal.SIGKILL)
        asking.join(30)
        assert answers == [{"TOLD": [b"7"]}]
