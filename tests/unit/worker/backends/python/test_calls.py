"""Calls of Python models to other models and to the repository, with real processes."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.support.fakes.called_models import CalledModels, ModelCall, called, outputs, respond
from tests.support.models.python_scripts import (
    DECOUPLED,
    Collected,
    ModelProcess,
    Models,
    execute_body,
    numbers,
    only,
    python_request,
)
from tests.support.waiting import wait_until
from weir.bus.payloads.arena import PayloadArena
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import Tensor
from weir.worker.backends.python.process import ProcessSpec, auto_complete

__all__ = ["called"]

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


def texts(process: ModelProcess) -> list[str]:
    (tensor,) = only(process.execute([python_request()])).outputs
    return [element.decode() for element in tensor.to_numpy()]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


class TestRequests:
    def test_every_field_reaches_the_called_model(self, models: Models, called: CalledModels) -> None:
        called.react = lambda call: respond(call, outputs())
        place = '{"traceparent":"00-' + "ab" * 16 + "-" + "cd" * 8 + '-01","tracestate":"x=1"}'
        source = asking(f"""
            asks("m").exec()
            asks("m", np.float32([[1]]), requested_output_names={{"B"}}, model_version=3, request_id="r", flags=7,
                 correlation_id="c", timeout=9, parameters={{"p": 1}}, trace=pb_utils.InferenceTrace({place!r})).exec()
            return [text()]
        """)
        with models.running(source, calls=called.calls) as process:
            texts(process)
        plain, full = (call.request for call in called.received)
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

    def test_large_tensors_of_many_threads_keep_apart(self, models: Models, called: CalledModels) -> None:
        called.react = lambda call: respond(call, outputs())
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
        with models.running(source, calls=called.calls) as process:
            texts(process)
        seen = sorted(call.contents for call in called.received)
        wanted = [[np.full(size + n, n, np.float32).tobytes() for size in (10, 20_000, 100_000)] for n in range(12)]
        assert seen == sorted(wanted)

    def test_received_strings_are_passed_on_unchanged(self, models: Models, called: CalledModels) -> None:
        called.react = lambda call: respond(call, outputs(call.request.inputs[0]))
        source = asking("""
            first = pb_utils.InferenceRequest(model_name="m", inputs=requests[0].inputs()).exec()
            again = pb_utils.InferenceRequest(model_name="m", inputs=first.output_tensors()).exec()
            return [pb_utils.InferenceResponse(again.output_tensors())]
        """)
        words = Tensor.from_numpy("W", np.array([b"\xff", b"x" * 100_000], np.object_), "BYTES")
        with models.running(source, calls=called.calls) as process:
            (back,) = only(process.execute([python_request(inputs=[words])])).outputs
            assert bytes(back.data) == bytes(words.data)

    def test_values_that_can_not_be_sent_raise_an_error(self, models: Models, called: CalledModels) -> None:
        called.react = lambda call: respond(call, outputs())
        source = asking("""
            try: asks("m", model_version=1 << 70).exec()
            except pb_utils.TritonModelException as error: reported = str(error)
            return [text(reported, asks("m").exec().has_error())]
        """)
        with models.running(source, calls=called.calls) as process:
            reported, has_error = texts(process)
        assert reported.startswith("the request can't be sent")
        assert has_error == "False"


class TestResponses:
    def test_outputs_by_reference_are_released(self, models: Models, called: CalledModels) -> None:
        arena = PayloadArena(f"test_{uuid.uuid4().hex[:8]}")
        try:
            slots = [arena.allocate(400_000) for _ in range(3)]
            for place, slot in enumerate(slots):
                assert slot is not None
                slot.view[:] = np.full(100_000, place, np.float32).tobytes()
            refs = [slot.ref() for slot in slots if slot is not None]
            slots[2].free()  # what lies there now is another's
            tensors = [Tensor(f"O{place}", "FP32", [100_000], ref) for place, ref in enumerate(refs)]
            called.react = lambda call: respond(
                call, outputs(*(tensors[:2] if call.request.id == "good" else tensors[1:]))
            )
            source = asking("""
                good, lost = asks("m", request_id="good").exec(), asks("m").exec()
                arrays = [tensor.as_numpy() for tensor in good.output_tensors()]
                arrays[0] += 1
                return [text(*(array.sum() for array in arrays), lost.error().message(), lost.error().code())]
            """)
            with models.running(source, calls=called.calls) as process:
                assert texts(process) == [
                    *("100000.0", "100000.0"),
                    *("the response was lost before it could be read", str(ErrorCode.INTERNAL.number)),
                ]
                wait_until(lambda: len(called.released) == 4)
            assert called.released == [*refs[:2], *refs[1:]]
        finally:
            arena.close()

    def test_errors_and_rejections(self, models: Models, called: CalledModels) -> None:
        called.react = lambda call: respond(call, WeirError(ErrorCode.UNAVAILABLE, "full"))
        source = asking("""
            errors = [asks(name).exec().error() for name in ("m", "nope", "decoupled")]
            return [text(*(f"{error.code()} {error.message()}" for error in errors))]
        """)
        with models.running(source, calls=called.calls) as process:
            full, unknown, decoupled = texts(process)
        assert full == "5 full"
        assert unknown == (
            "3 Model nope - Error when running inference: Failed for execute the inference request. Model 'nope' is not "
            "ready."
        )
        assert decoupled.startswith(
            "6 Model decoupled - Error when running inference: Model decoupled is using the dec"
        )

    def test_streams(self, models: Models, called: CalledModels) -> None:
        called.react = lambda call: respond(call, *map(outputs, map(numbers, (1, 2))), None)
        source = asking("""
            responses = asks("decoupled").exec(decoupled=True)
            counts = [[len(response.output_tensors()) for response in responses] for _ in range(2)]
            try: next(responses)
            except StopIteration as end: return [text(*counts, end)]
        """)
        with models.running(source, calls=called.calls) as process:
            assert texts(process) == ["[1, 1, 0]", "[1, 1, 0]", "Iteration is done for the responses."]

    def test_awaited_streams_run_concurrently(self, models: Models, called: CalledModels) -> None:
        """A model may read them without `await` once the first response has arrived; all four are sent before."""

        def react(call: ModelCall) -> None:
            if len(called.received) == 4:
                for waiting in called.received:
                    respond(waiting, outputs(numbers(1)), None)

        called.react = react
        source = asking("""
            sender = requests[0].get_response_sender()
            counts = [len(response.output_tensors()) for response in await asks("decoupled").async_exec(decoupled=True)]
            sender.send(text(*counts), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """).replace("def execute", "async def execute")
        with models.running(source, DECOUPLED, calls=called.calls) as process:
            sinks = [Collected() for _ in range(4)]
            for sink in sinks:
                process.execute([python_request()], sink)
            wait_until(lambda: all(sink.over for sink in sinks))
        assert [sink.texts() for sink in sinks] == [["1"]] * 4

    def test_an_awaited_stream_is_cancelled_with_its_task(self, models: Models, called: CalledModels) -> None:
        source = asking("""
            import asyncio

            waiting = asks("decoupled").async_exec(decoupled=True)
            await asyncio.sleep(0)
            waiting.cancel()
            try: await waiting
            except asyncio.CancelledError: return [text("cancelled")]
        """).replace("def execute", "async def execute")
        with models.running(source, calls=called.calls) as process:
            assert texts(process) == ["cancelled"]
            wait_until(lambda: called.cancelled == called.received != [])

    def test_a_stream_that_is_cancelled(self, models: Models, called: CalledModels) -> None:
        """Its responses arrive up to the last one, whatever the called model makes of it."""
        called.react = lambda call: call.on_response(outputs(), False)

        def react_to_cancel(call: ModelCall) -> None:
            call.on_response(outputs(), False)
            call.on_response(WeirError(ErrorCode.CANCELLED, "stopped"), True)

        called.react_to_cancel = react_to_cancel
        source = asking("""
            responses = asks("decoupled").exec(decoupled=True)
            next(responses)
            responses.cancel()
            codes = [one.error().code() if one.has_error() else None for one in responses]
            responses.cancel()
            return [text(codes == [None, pb_utils.TritonError.CANCELLED])]
        """)
        with models.running(source, calls=called.calls) as process:
            assert texts(process) == ["True"]
            assert called.cancelled_heard == called.received
            assert not called.cancelled
            wait_until(lambda: not called.calls.has_open_calls("m_0_0"))

    def test_a_deleted_iterator_does_not_cancel_its_stream(self, models: Models, called: CalledModels) -> None:
        held: list[ModelCall] = []
        called.react = held.append
        source = asking("""
            asks("decoupled").exec(decoupled=True)
            return [text(asks("m").exec().has_error())] if requests[0].request_id() else [text()]
        """)
        with models.running(source, calls=called.calls) as process:
            texts(process)
            wait_until(lambda: held)
            called.loop.call_soon_threadsafe(respond, held[0], outputs(), None)
            called.react = lambda call: respond(call, outputs())
            only(process.execute([python_request("r")]))
        assert not called.cancelled


class TestEnds:
    def test_only_while_the_model_can_be_executed(self, models: Models, called: CalledModels, tmp_path: Path) -> None:
        reported = tmp_path / "reported"
        source = f"""
            import triton_python_backend_utils as pb_utils

            def tried(what):
                for call in (pb_utils.InferenceRequest(model_name="m").exec, lambda: pb_utils.load_model("m")):
                    try: call()
                    except pb_utils.TritonModelException as error: print(what, error, file=open({str(reported)!r}, "a"))

            class TritonPythonModel:
                @staticmethod
                def auto_complete_config(config):
                    tried("complete:")
                    return config
                def initialize(self, args): tried("initialize:")
                def finalize(self): tried("finalize:")
                def execute(self, requests): pass
        """
        auto_complete(ProcessSpec(models.write(source), 1), {})
        with models.running(source, calls=called.calls):
            pass
        bls = "BLS is only supported during the 'execute' function."
        control = "Failed to load model: this is possible only in 'initialize' and 'execute'"
        assert reported.read_text().splitlines() == [
            *(f"complete: {bls}", f"complete: {control}", f"initialize: {bls}"),
            *(f"finalize: {bls}", f"finalize: {control}"),
        ]
        assert called.operations == [("load", "m", None, {})]

    def test_calls_without_a_worker(self, models: Models) -> None:
        source = asking("""
            try: asks("m").exec()
            except pb_utils.TritonModelException as error: return [text(error)]
            return [text(asks("m").exec().error().message())]
        """)
        with models.running(source) as process:
            assert texts(process)[0].startswith("the worker has ended")

    def test_the_calls_of_a_process_that_dies_are_cancelled(self, models: Models, called: CalledModels) -> None:
        slots = []
        arena = PayloadArena(f"test_{uuid.uuid4().hex[:8]}")
        try:
            slots.append(arena.allocate(100_000))
            assert slots[0] is not None
            lent = Tensor("O", "FP32", [25_000], slots[0].ref())

            def react(call: ModelCall) -> None:
                call.on_response(outputs(lent), False)
                os.kill(process.pid, 9)

            called.react = react
            source = asking("""
                import signal, threading
                threading.Thread(target=lambda: asks("decoupled").exec(decoupled=True)).start()
                list(asks("decoupled").exec(decoupled=True))
            """)
            with models.running(source, DECOUPLED, called.calls) as process:
                with pytest.raises(Exception, match="SIGKILL"):
                    process.execute([python_request()])
                wait_until(lambda: called.received and len(called.cancelled) == len(called.received))
                wait_until(lambda: lent.data in called.released)
                assert not called.calls.has_open_calls("m_0_0")
        finally:
            arena.close()


class TestRepository:
    def test_operations(self, models: Models, called: CalledModels) -> None:
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
        with models.running(source, calls=called.calls) as process:
            loaded, unknown, nameless, no_bytes, no_files, no_name, unloaded, ready, unready = texts(process)
        assert (loaded, unloaded, ready, unready) == ("None", "None", "True", "False")
        assert unknown == (
            "Failed to load model: Failed to process the request for model 'm_0_0', message: no such model"
        )
        assert nameless.endswith("the name of file '1/a' does not begin with 'file:'")
        assert no_bytes.startswith("files must be bytes by path")
        assert no_files == "failed to load model 'm', files should be a dictionary of file paths and file contents"
        assert no_name.startswith("load_model(): incompatible function arguments")
        assert called.operations == [
            ("load", "m", "{}", {"1/a": b"x"}),
            ("load", "nope", None, {}),
            ("unload", "m", True),
        ]
