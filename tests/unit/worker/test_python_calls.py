"""What a Python model asks of its worker: the process, the connection, and the tensors between them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import numpy as np
import pytest
from asked_models import AskedModels, Question, answer, asked, outputs
from python_models import Models, execute_body, numbers, only
from python_senders import DECOUPLED, Collected, until

from bus.payloads import PayloadArena
from schemas.errors import ErrorCode, WeirError
from schemas.tensors import Tensor
from worker.backends.python_process import PythonProcess, PythonRequest, auto_complete

__all__ = ["asked"]

TEXTS = """
        def text(*lines):
            return pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array([str(l) for l in lines], dtype=np.object_))])

        def asks(model, *arrays, **more):
            inputs = [pb_utils.Tensor(f"I{place}", array) for place, array in enumerate(arrays)]
            return pb_utils.InferenceRequest(model_name=model, inputs=inputs, **more)
"""


def asking(body: str) -> str:
    head, _, rest = execute_body(body).partition("    def execute(self, requests):\n")
    return f"{head}    def execute(self, requests):\n{TEXTS}{rest}"


def texts(process: PythonProcess) -> list[str]:
    (tensor,) = only(process.execute([PythonRequest()])).outputs
    return [element.decode() for element in tensor.to_numpy()]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


class TestRequests:
    def test_what_reaches_the_asked_model(self, models: Models, asked: AskedModels) -> None:
        asked.react = lambda question: answer(question, outputs())
        place = '{"traceparent":"00-' + "ab" * 16 + "-" + "cd" * 8 + '-01","tracestate":"x=1"}'
        source = asking(f"""
            asks("m").exec()
            asks("m", np.float32([[1]]), requested_output_names={{"B"}}, model_version=3, request_id="r", flags=7,
                 correlation_id="c", timeout=9, parameters={{"p": 1}}, trace=pb_utils.InferenceTrace({place!r})).exec()
            return [text()]
        """)
        with models.running(source, calls=asked.calls) as process:
            texts(process)
        plain, full = (question.request for question in asked.questions)
        assert (plain.model_version, plain.id, plain.outputs, plain.parameters, plain.traceparent) == (
            "",
            "",
            [],
            None,
            "",
        )
        assert (full.model_version, full.id, full.correlation_id, full.timeout_us) == ("3", "r", "c", 9)
        assert (full.sequence_flags, full.parameters, [output.name for output in full.outputs]) == (3, {"p": 1}, ["B"])
        assert (full.traceparent, full.tracestate) == (f"00-{'ab' * 16}-{'cd' * 8}-01", "x=1")
        assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in full.inputs] == [("I0", "FP32", [1, 1])]

    def test_large_tensors_of_many_threads_keep_apart(self, models: Models, asked: AskedModels) -> None:
        asked.react = lambda question: answer(question, outputs())
        source = asking("""
            import threading
            sizes = (10, 20_000, 100_000)
            threads = [
                threading.Thread(target=asks("m", *(np.full(size + n, n, np.float32) for size in sizes)).exec)
                for n in range(12)
            ]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            return [text()]
        """)
        with models.running(source, calls=asked.calls) as process:
            texts(process)
        seen = sorted(question.contents for question in asked.questions)
        wanted = [[np.full(size + n, n, np.float32).tobytes() for size in (10, 20_000, 100_000)] for n in range(12)]
        assert seen == sorted(wanted)

    def test_received_strings_are_passed_on_as_they_came(self, models: Models, asked: AskedModels) -> None:
        asked.react = lambda question: answer(question, outputs(question.request.inputs[0]))
        source = asking("""
            first = pb_utils.InferenceRequest(model_name="m", inputs=requests[0].inputs()).exec()
            again = pb_utils.InferenceRequest(model_name="m", inputs=first.output_tensors()).exec()
            return [pb_utils.InferenceResponse(again.output_tensors())]
        """)
        words = Tensor.from_numpy("W", np.array([b"\xff", b"x" * 100_000], np.object_), "BYTES")
        with models.running(source, calls=asked.calls) as process:
            (back,) = only(process.execute([PythonRequest(inputs=[words])])).outputs
            assert bytes(back.data) == bytes(words.data)

    def test_what_can_not_be_sent_raises_and_harms_nothing(self, models: Models, asked: AskedModels) -> None:
        asked.react = lambda question: answer(question, outputs())
        source = asking("""
            try: asks("m", model_version=1 << 70).exec()
            except pb_utils.TritonModelException as error: told = str(error)
            return [text(told, asks("m").exec().has_error())]
        """)
        with models.running(source, calls=asked.calls) as process:
            told, has_error = texts(process)
        assert told.startswith("the request can't be sent")
        assert has_error == "False"


class TestResponses:
    def test_by_reference_and_given_back(self, models: Models, asked: AskedModels) -> None:
        arena = PayloadArena(f"test_{uuid.uuid4().hex[:8]}")
        try:
            slots = [arena.allocate(400_000) for _ in range(3)]
            for place, slot in enumerate(slots):
                assert slot is not None
                slot.view[:] = np.full(100_000, place, np.float32).tobytes()
            refs = [slot.ref() for slot in slots if slot is not None]
            slots[2].free()  # what lies there now is another's
            tensors = [Tensor(f"O{place}", "FP32", [100_000], ref) for place, ref in enumerate(refs)]
            asked.react = lambda question: answer(
                question, outputs(*(tensors[:2] if question.request.id == "good" else tensors[1:]))
            )
            source = asking("""
                good, lost = asks("m", request_id="good").exec(), asks("m").exec()
                arrays = [tensor.as_numpy() for tensor in good.output_tensors()]
                arrays[0] += 1
                return [text(*(array.sum() for array in arrays), lost.error().message(), lost.error().code())]
            """)
            with models.running(source, calls=asked.calls) as process:
                assert texts(process) == [
                    *("100000.0", "100000.0"),
                    *("the response was lost before it could be read", str(ErrorCode.INTERNAL.number)),
                ]
                until(lambda: len(asked.released) == 4)
            assert asked.released == [*refs[:2], *refs[1:]]
        finally:
            arena.close()

    def test_errors_and_refusals(self, models: Models, asked: AskedModels) -> None:
        asked.react = lambda question: answer(question, WeirError(ErrorCode.UNAVAILABLE, "full"))
        source = asking("""
            errors = [asks(name).exec().error() for name in ("m", "nope", "decoupled")]
            return [text(*(f"{error.code()} {error.message()}" for error in errors))]
        """)
        with models.running(source, calls=asked.calls) as process:
            full, unknown, decoupled = texts(process)
        assert full == "5 full"
        assert unknown == (
            "3 Model nope - Error when running inference: Failed for execute the inference request. Model 'nope' is not "
            "ready."
        )
        assert decoupled.startswith(
            "6 Model decoupled - Error when running inference: Model decoupled is using the dec"
        )

    def test_streams(self, models: Models, asked: AskedModels) -> None:
        asked.react = lambda question: answer(question, *map(outputs, map(numbers, (1, 2))), None)
        source = asking("""
            responses = asks("decoupled").exec(decoupled=True)
            counts = [[len(response.output_tensors()) for response in responses] for _ in range(2)]
            try: next(responses)
            except StopIteration as end: return [text(*counts, end)]
        """)
        with models.running(source, calls=asked.calls) as process:
            assert texts(process) == ["[1, 1, 0]", "[1, 1, 0]", "Iteration is done for the responses."]

    def test_streams_that_are_awaited_run_beside_each_other(self, models: Models, asked: AskedModels) -> None:
        """A model may read them without `await` once they have begun: nobody answers before all four have asked."""

        def react(question: Question) -> None:
            if len(asked.questions) == 4:
                for waiting in asked.questions:
                    answer(waiting, outputs(numbers(1)), None)

        asked.react = react
        source = asking("""
            sender = requests[0].get_response_sender()
            counts = [len(response.output_tensors()) for response in await asks("decoupled").async_exec(decoupled=True)]
            sender.send(text(*counts), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """).replace("def execute", "async def execute")
        with models.running(source, DECOUPLED, calls=asked.calls) as process:
            sinks = [Collected() for _ in range(4)]
            for sink in sinks:
                process.execute([PythonRequest()], sink)
            until(lambda: all(sink.over for sink in sinks))
        assert [sink.texts() for sink in sinks] == [["1"]] * 4

    def test_an_awaited_stream_is_given_up_when_its_task_is_cancelled(self, models: Models, asked: AskedModels) -> None:
        source = asking("""
            import asyncio

            waiting = asks("decoupled").async_exec(decoupled=True)
            await asyncio.sleep(0)
            waiting.cancel()
            try: await waiting
            except asyncio.CancelledError: return [text("cancelled")]
        """).replace("def execute", "async def execute")
        with models.running(source, calls=asked.calls) as process:
            assert texts(process) == ["cancelled"]
            until(lambda: asked.abandoned == asked.questions != [])

    def test_a_stream_that_is_cancelled(self, models: Models, asked: AskedModels) -> None:
        asked.react = lambda question: question.on_answer(outputs(), False)
        source = asking("""
            responses = asks("decoupled").exec(decoupled=True)
            next(responses)
            responses.cancel()
            return [text(len(list(responses)))]
        """)
        with models.running(source, calls=asked.calls) as process:
            texts(process)
            until(lambda: asked.abandoned == asked.questions)
            assert not asked.calls.is_asking("m_0_0")

    def test_a_dropped_stream_goes_on(self, models: Models, asked: AskedModels) -> None:
        held: list[Question] = []
        asked.react = held.append
        source = asking("""
            asks("decoupled").exec(decoupled=True)
            return [text(asks("m").exec().has_error())] if requests[0].request_id() else [text()]
        """)
        with models.running(source, calls=asked.calls) as process:
            texts(process)
            until(lambda: held)
            asked.loop.call_soon_threadsafe(answer, held[0], outputs(), None)
            asked.react = lambda question: answer(question, outputs())
            only(process.execute([PythonRequest("r")]))
        assert not asked.abandoned


class TestEnds:
    def test_only_while_the_model_can_be_executed(self, models: Models, asked: AskedModels, tmp_path: Path) -> None:
        told = tmp_path / "told"
        source = f"""
            import triton_python_backend_utils as pb_utils

            def tried(what):
                for call in (pb_utils.InferenceRequest(model_name="m").exec, lambda: pb_utils.load_model("m")):
                    try: call()
                    except pb_utils.TritonModelException as error: print(what, error, file=open({str(told)!r}, "a"))

            class TritonPythonModel:
                @staticmethod
                def auto_complete_config(config):
                    tried("complete:")
                    return config
                def initialize(self, args): tried("initialize:")
                def finalize(self): tried("finalize:")
                def execute(self, requests): pass
        """
        auto_complete(models.write(source), 1, "model.py", {})
        with models.running(source, calls=asked.calls):
            pass
        bls = "BLS is only supported during the 'execute' function."
        control = "Failed to load model: it is possible in 'initialize' and 'execute' only"
        assert told.read_text().splitlines() == [
            *(f"complete: {bls}", f"complete: {control}", f"initialize: {bls}"),
            *(f"finalize: {bls}", f"finalize: {control}"),
        ]
        assert asked.operations == [("load", "m", None, {})]

    def test_without_anybody_to_ask(self, models: Models) -> None:
        source = asking("""
            try: asks("m").exec()
            except pb_utils.TritonModelException as error: return [text(error)]
            return [text(asks("m").exec().error().message())]
        """)
        with models.running(source) as process:
            assert texts(process)[0].startswith("the worker is gone")

    def test_a_process_that_dies_gives_up_what_it_asked(self, models: Models, asked: AskedModels) -> None:
        slots = []
        arena = PayloadArena(f"test_{uuid.uuid4().hex[:8]}")
        try:
            slots.append(arena.allocate(100_000))
            assert slots[0] is not None
            lent = Tensor("O", "FP32", [25_000], slots[0].ref())

            def react(question: Question) -> None:
                question.on_answer(outputs(lent), False)
                assert process.pid is not None
                os.kill(process.pid, 9)

            asked.react = react
            source = asking("""
                import signal, threading
                threading.Thread(target=lambda: asks("decoupled").exec(decoupled=True)).start()
                list(asks("decoupled").exec(decoupled=True))
            """)
            with models.running(source, DECOUPLED, asked.calls) as process:
                with pytest.raises(Exception, match="SIGKILL"):
                    process.execute([PythonRequest()])
                until(lambda: asked.questions and len(asked.abandoned) == len(asked.questions))
                until(lambda: lent.data in asked.released)
                assert not asked.calls.is_asking("m_0_0")
        finally:
            arena.close()

    def test_a_restarted_process_asks_again(self, models: Models, asked: AskedModels) -> None:
        asked.react = lambda question: answer(question, outputs())
        with models.running(asking('return [text(asks("m").exec().has_error())]'), calls=asked.calls) as process:
            assert texts(process) == ["False"]
            process.kill()
            with pytest.raises(Exception, match="SIGKILL"):
                texts(process)
            process.start(30)
            assert texts(process) == ["False"]


class TestRepository:
    def test_operations(self, models: Models, asked: AskedModels) -> None:
        source = asking("""
            def tried(call, *arguments, **more):
                try: return call(*arguments, **more)
                except (pb_utils.TritonModelException, TypeError) as error: return str(error).splitlines()[0]

            return [text(
                tried(pb_utils.load_model, "m", config="{}", files={"file:1/a": b"x"}),
                tried(pb_utils.load_model, "nope"),
                tried(pb_utils.load_model, "m", files={"1/a": b"x"}),
                tried(pb_utils.load_model, "m", files={"file:1/a": "x"}),
                tried(pb_utils.load_model, "m", files=3),
                tried(pb_utils.load_model, 3),
                tried(pb_utils.unload_model, "m", unload_dependents=True),
                tried(pb_utils.is_model_ready, "m"),
                tried(pb_utils.is_model_ready, "nope", "1"),
            )]
        """)
        with models.running(source, calls=asked.calls) as process:
            loaded, unknown, nameless, no_bytes, no_files, no_name, unloaded, ready, unready = texts(process)
        assert (loaded, unloaded, ready, unready) == ("None", "None", "True", "False")
        assert unknown == (
            "Failed to load model: Failed to process the request for model 'm_0_0', message: no such model"
        )
        assert nameless.endswith("the name of file '1/a' does not begin with 'file:'")
        assert no_bytes.startswith("files must be bytes by path")
        assert no_files == "failed to load model 'm', files should be a dictionary of file paths and file contents"
        assert no_name.startswith("load_model(): incompatible function arguments")
        assert asked.operations == [
            ("load", "m", "{}", {"1/a": b"x"}),
            ("load", "nope", None, {}),
            ("unload", "m", True),
        ]
