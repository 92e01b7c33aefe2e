"""Responses that a Python model sends itself, during `execute` and after it, decoupled and not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.python_scripts import (
    DECOUPLED,
    Collected,
    Models,
    body,
    code_and_message,
    python_request,
    run,
)
from tests.support.waiting import wait_until
from weir.schemas.core.errors import ErrorCode
from weir.schemas.core.tensors import Tensor


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


class TestDecoupled:
    def test_what_a_sender_rejects(self, models: Models) -> None:
        with models.running(
            body("""
            sender = requests[0].get_response_sender()
            assert sender is requests[0].get_response_sender()
            results = [
                tried(sender.send), tried(sender.send, "x"), tried(sender.send, flags="a"), tried(sender.send, None, 2),
                tried(sender.send, texts("no"), 5),
            ]
            sender.send(texts("first"))
            sender.send(texts(json.dumps(results)), FINAL)
            self.results = [tried(sender.send, texts("no")), tried(sender.send, flags=FINAL), str(sender.is_cancelled())]
            requests[1].get_response_sender().send(texts(json.dumps(self.results)), flags=FINAL)
        """),
            DECOUPLED,
        ) as process:
            returned, sink = run(process, "a", "b")
        assert returned == [None, None]
        closed = "TritonModelException: Unable to send response. Response sender has been closed."
        unsupported = "TritonModelException: Unable to send response. Unsupported flag provided."
        wrong = "TypeError: send(): incompatible function arguments. The following argument types are supported:"
        missing = (
            "TritonModelException: Inference Response object must be provided when the response flags is set to zero."
        )
        first, results = sink.texts()
        assert first == "first"
        assert json.loads(results) == [missing, wrong, wrong, unsupported, unsupported]
        assert json.loads(sink.texts(1)[0]) == [closed, closed, "False"]
        assert sink.over == [0, 1]

    def test_execute_must_return_nothing(self, models: Models) -> None:
        with models.running(body("return []"), DECOUPLED) as process:
            (response,), _ = run(process)
        assert response is not None
        assert code_and_message(response.error) == (
            ErrorCode.INTERNAL,
            "Failed to process the request(s) for model 'm_0_0', message: Python model 'm_0_0' is using the decoupled "
            "mode and the execute function must return None.",
        )

    def test_after_a_failure_its_senders_are_closed(self, models: Models) -> None:
        with models.running(
            body("""
            if requests[0].request_id() == "ask":
                sender = requests[0].get_response_sender()
                sender.send(texts(tried(self.kept.send, texts("late"))), FINAL)
                return
            self.kept = requests[0].get_response_sender()
            self.kept.send(texts("early"))
            raise ValueError("boo")
        """),
            DECOUPLED,
        ) as process:
            (response,), sink = run(process)
            _, asked = run(process, "ask")
        assert response is not None
        assert response.error is not None
        assert "ValueError: boo" in response.error.message
        assert sink.texts() == ["early"]
        assert asked.texts() == ["TritonModelException: Unable to send response. Response sender has been closed."]

    def test_many_threads_send_large_responses_of_several_runs(self, models: Models) -> None:
        with models.running(
            body("""
            import threading

            def send(request):
                sender = request.get_response_sender()
                for number in range(10):
                    array = np.full((50_000 + number,), number, np.float32)
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("A", array)]))
                sender.send(flags=FINAL)

            for request in requests:
                threading.Thread(target=send, args=(request,)).start()
        """),
            DECOUPLED,
        ) as process:
            sinks = [run(process, *"abcd")[1] for _ in range(3)]
            wait_until(lambda: all(len(sink.over) == 4 for sink in sinks))
        for sink in sinks:
            for position in range(4):
                *responses, end = sink.responses[position]
                assert end is None
                for number, response in enumerate(responses):
                    assert response is not None
                    array = response.outputs[0].to_numpy()
                    assert array.shape == (50_000 + number,)
                    assert (array == number).all()

    def test_inputs_last_while_the_model_works_on_them(self, models: Models) -> None:
        with models.running(
            body("""
            import threading

            self.asked = getattr(self, "asked", []) + requests
            if len(self.asked) < 3:
                return

            def send():
                for request in self.asked:
                    request.get_response_sender().send(
                        pb_utils.InferenceResponse([pb_utils.Tensor("A", request.inputs()[0].as_numpy())]), FINAL
                    )

            threading.Thread(target=send).start()
        """),
            DECOUPLED,
        ) as process:
            sinks = []
            for value in range(3):
                sinks.append(Collected())
                tensor = Tensor.from_numpy("A", np.full(100_000, value, np.float32), "FP32")
                process.execute([python_request(inputs=[tensor])], sinks[-1])
            wait_until(lambda: all(sink.over for sink in sinks))
        for value, sink in enumerate(sinks):
            (response,) = sink.responses[0]
            assert response is not None
            assert set(response.outputs[0].to_numpy().tolist()) == {value}

    def test_only_requested_outputs_are_sent(self, models: Models) -> None:
        with models.running(
            body("""
            outputs = [pb_utils.Tensor(name, np.zeros(1, np.int32)) for name in "ABC"]
            requests[0].get_response_sender().send(pb_utils.InferenceResponse(outputs), FINAL)
        """),
            DECOUPLED,
        ) as process:
            sink = Collected()
            process.execute([python_request(outputs=["C", "A"])], sink)
        (response,) = sink.responses[0]
        assert response is not None
        assert [tensor.name for tensor in response.outputs] == ["A", "C"]

    def test_cancelled_requests(self, models: Models) -> None:
        with models.running(
            body("""
            for request in requests:
                sender = request.get_response_sender()
                results = f"{request.is_cancelled()} {sender.is_cancelled()}"
                sender.send(texts(results), FINAL)
        """),
            DECOUPLED,
        ) as process:
            sink = Collected()
            sink.cancelled = {1}
            process.execute([python_request(), python_request()], sink)
        assert (sink.texts(0), sink.texts(1)) == (["False False"], ["True True"])


class TestNotDecoupled:
    def test_a_response_is_the_last_one(self, models: Models) -> None:
        with models.running(
            body("""
            sender = requests[0].get_response_sender()
            results = [tried(sender.send, flags=FINAL)]
            sender.send(texts("only"))
            results += [tried(sender.send, texts("x")), tried(sender.send, flags=FINAL), tried(sender.send, flags=FINAL)]
            return [None, texts(json.dumps(results))]
        """)
        ) as process:
            (first, second), sink = run(process, "a", "b")
        assert first is None
        assert (sink.texts(), sink.over) == (["only"], [0])
        assert second is not None
        assert json.loads(second.outputs[0].to_numpy()[0]) == [
            "TritonModelException: Unable to send response. Non-decoupled model cannot send complete final before sending "
            "a response.",
            "TritonModelException: Unable to send response. Non-decoupled model cannot send more than one response.",
            "ok",
            "TritonModelException: Unable to send response. Response sender has been closed.",
        ]

    @pytest.mark.parametrize("returned", ["None", "[None]"])
    def test_no_response_at_all(self, models: Models, returned: str) -> None:
        with models.running(body(f"return {returned}")) as process:
            (response,), sink = run(process)
        assert response is not None
        assert code_and_message(response.error) == (ErrorCode.INTERNAL, "expected a single response, got 0")
        assert not sink.responses

    def test_one_sent_and_one_returned(self, models: Models) -> None:
        with models.running(
            body("""
            requests[0].get_response_sender().send(texts("sent"), FINAL)
            return [texts("returned")]
        """)
        ) as process:
            (response,), sink = run(process)
        assert sink.texts() == ["sent"]
        assert response is not None
        assert response.error is not None
        assert "cannot send more than one response" in response.error.message

    def test_a_response_after_execute_has_returned(self, models: Models) -> None:
        with models.running(
            body("""
            import threading
            sender = requests[0].get_response_sender()
            threading.Timer(0.05, lambda: sender.send(texts("late"), FINAL)).start()
        """)
        ) as process:
            returned, sink = run(process)
            assert returned == [None]
            wait_until(lambda: sink.over)
        assert sink.texts() == ["late"]

    def test_a_request_of_the_models_own_has_no_sender(self, models: Models) -> None:
        with models.running(
            body("""
            own = pb_utils.InferenceRequest(model_name="other")
            return [texts(tried(own.get_response_sender) + str(own.is_cancelled()))]
        """)
        ) as process:
            (response,), _ = run(process)
        assert response is not None
        text = response.outputs[0].to_numpy()[0]
        assert text == b"TritonModelException: a request made by a model has no response senderFalse"
