"""`EnsemblePlan` and `EnsembleRun` on random graphs of steps: one end, and no value lost or released twice."""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.schemas.config.model_config import ModelConfig
from weir.worker.ensembles.run import EnsemblePlan, EnsembleRun, RunActions, StepCall

tried: Counter[str] = Counter()
"""The events of the property test, by kind."""


def plan_of(steps, inputs=("X",), outputs=("Y",), decoupled=()):
    """A plan of steps (model, {tensor taken}, {tensor written}); a model's tensors are named as the ensemble's."""
    rows = [
        {
            "model_name": model,
            "model_version": -1,
            "input_map": {name: name for name in taken},
            "output_map": {name: name for name in written},
        }
        for model, taken, written in steps
    ]
    tensors = {"input": inputs, "output": outputs}
    fields = {
        kind: [{"name": n, "data_type": "TYPE_FP32", "dims": [1]} for n in names] for kind, names in tensors.items()
    }
    config = {"name": "e", "platform": "ensemble", "ensemble_scheduling": {"step": rows}, **fields}
    return EnsemblePlan(ModelConfig.model_validate(config), decoupled)


class Shell:
    """Carries out actions, tracks the owner of each value, and checks the guarantees of the run."""

    def __init__(self, plan, outputs=()):
        self.selection = plan.select(outputs)
        self.run: EnsembleRun[int] = EnsembleRun(self.selection, plan.is_decoupled)
        self.values = count()
        self.held: set[int] = set()
        self.calls: list[StepCall[int]] = []
        self.given_up: list[StepCall[int]] = []
        self.responses: list[dict[str, int]] = []
        self.started: Counter[int] = Counter()
        self.ends = 0
        self.is_deadlock = False

    def fresh(self, names):
        made = {name: next(self.values) for name in names}
        self.held.update(made.values())
        return made

    def do(self, actions: RunActions[int]) -> None:
        if self.ends:
            assert not (actions.start + actions.respond + actions.cancel)
            assert not actions.ended
        for value in actions.release:
            self.held.remove(value)
        for response in actions.respond:
            assert response.keys() == self.selection.outputs
            for value in response.values():
                self.held.remove(value)
            self.responses.append(response)
        for call in actions.start:
            assert set(call.inputs.values()) <= self.held, "a step was given a value that is gone"
            self.started[call.step.number] += 1
            self.calls.append(call)
        for call in actions.cancel:
            self.calls.remove(call)
            self.given_up.append(call)
        self.ends += actions.ended
        self.is_deadlock |= actions.is_deadlock
        if actions.ended:
            # What was given up by the run itself is not running any more.
            assert not self.calls
        for call in self.calls:
            assert set(call.inputs.values()) <= self.held, "a running step has lost an input"

    def answer(self, call, names, is_last=True):
        outputs = None if names is None else self.fresh(names)
        if is_last:
            self.calls.remove(call)
        self.do(self.run.responded(call, outputs, is_last))

    def begin(self, given=("X",), absent=()):
        self.do(self.run.begin(self.fresh(given), frozenset(absent)))


def steps_running(shell):
    return sorted(call.step.number for call in shell.calls)


def test_independent_steps_run_at_once_and_join():
    plan = plan_of([("a", "X", "P"), ("b", "X", "Q"), ("c", "PQ", "Y")])
    shell = Shell(plan)
    shell.begin()
    assert steps_running(shell) == [0, 1]
    first, second = shell.calls
    shell.answer(second, "Q")
    assert steps_running(shell) == [0]
    shell.answer(first, "P")
    assert steps_running(shell) == [2]
    shell.answer(shell.calls[0], "Y")
    assert (len(shell.responses), shell.ends, shell.held) == (1, 1, set())


def test_steps_that_contribute_to_no_requested_output_never_run():
    plan = plan_of([("a", "X", "M"), ("b", "M", "Y"), ("c", "M", "Z")], outputs="YZ")
    shell = Shell(plan, "Z")
    shell.begin()
    while shell.calls:
        shell.answer(shell.calls[0], [name for _, name in shell.calls[0].step.outputs])
    assert shell.started.keys() == {0, 2}
    assert len(shell.responses) == 1


def test_an_intermediate_tensor_may_be_the_only_requested_output():
    plan = plan_of([("a", "X", "M"), ("b", "M", "Y")], outputs="YM")
    shell = Shell(plan, "M")
    shell.begin()
    shell.answer(shell.calls[0], "M")
    assert (len(shell.responses), shell.started, shell.ends) == (1, {0: 1}, 1)


def test_a_mapped_tensor_that_a_response_lacks_stays_unset():
    shell = Shell(plan_of([("a", "X", "PQ"), ("b", "PQ", "Y")]))
    shell.begin()
    shell.answer(shell.calls[0], "P")
    assert shell.calls[0].inputs.keys() == {"P"}


def test_a_missing_output_is_a_deadlock():
    shell = Shell(plan_of([("a", "X", "Y")]))
    shell.begin()
    shell.answer(shell.calls[0], "")
    assert (shell.is_deadlock, shell.ends, shell.held) == (True, 1, set())


def test_a_decoupled_ensemble_may_end_without_a_response():
    shell = Shell(plan_of([("a", "X", "Y")], decoupled={"a"}))
    shell.begin()
    shell.answer(shell.calls[0], None)
    assert (shell.is_deadlock, shell.ends, shell.responses) == (False, 1, [])


def test_responses_of_a_decoupled_step_are_separate_iterations():
    shell = Shell(plan_of([("r", "X", "M"), ("a", "M", "P"), ("b", "MP", "Y")], decoupled={"r"}))
    shell.begin()
    repeat = shell.calls[0]
    shell.answer(repeat, "M", is_last=False)
    shell.answer(repeat, "M", is_last=False)
    assert steps_running(shell) == [0, 1, 1]
    shell.answer(repeat, None)
    while shell.calls:
        call = shell.calls[-1]
        shell.answer(call, [name for _, name in call.step.outputs])
    assert (shell.started, len(shell.responses), shell.ends) == ({0: 1, 1: 2, 2: 2}, 2, 1)


def test_an_output_that_is_also_an_input_is_returned_after_the_step():
    shell = Shell(plan_of([("r", "X", "M"), ("a", "M", "Y")], outputs="MY", decoupled={"r"}))
    shell.begin()
    repeat = shell.calls[0]
    shell.answer(repeat, "M", is_last=False)
    step = shell.calls[-1]
    shell.answer(step, "Y", is_last=False)
    assert not shell.responses, "the step still reads M"
    shell.answer(step, None)
    assert len(shell.responses) == 1


@st.composite
def graphs(draw):
    """Steps in an order in which they can run; each takes tensors of earlier steps."""
    inputs = ["X0", "X1"]
    tensors, steps = list(inputs), []
    for number in range(draw(st.integers(1, 7))):
        taken = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3, unique=True))
        written = [f"T{number}_{index}" for index in range(draw(st.integers(1, 2)))]
        steps.append((f"m{number}", taken, written))
        tensors += written
    written = tensors[2:]
    outputs = draw(st.lists(st.sampled_from(written), min_size=1, max_size=3, unique=True))
    decoupled = draw(st.sets(st.sampled_from([step[0] for step in steps]), max_size=2))
    order = draw(st.permutations(steps))
    return plan_of(order, inputs, outputs, decoupled), draw(st.lists(st.sampled_from(outputs), unique=True))


EVENTS = ["answer"] * 8 + ["stream"] * 2 + ["lacking", "fail", "cancel", "late"]


@settings(max_examples=200)
@given(graphs(), st.sets(st.sampled_from(["X0", "X1"]), max_size=1), st.randoms(use_true_random=False))
def test_a_run_ends_once_and_releases_every_value_once(graph, absent, random):
    plan, asked = graph
    for _ in range(20):
        end_somehow(Shell(plan, asked), absent, random)


def end_somehow(shell, absent, random):
    """One run with random events until its end, and events after it."""
    shell.begin({"X0", "X1"} - absent, absent)
    for _ in range(60):
        if shell.ends:
            break
        event = random.choice(EVENTS)
        call = random.choice(shell.calls)
        names = [name for _, name in call.step.outputs]
        tried[event] += 1
        if event == "answer":
            shell.answer(call, None if call.step.is_decoupled and random.random() < 0.5 else names)
        elif event == "stream":
            shell.answer(call, names, is_last=False)
        elif event == "lacking":
            shell.answer(call, names[1:])
        elif event == "fail":
            shell.calls.remove(call)
            shell.do(shell.run.failed(call))
        elif event == "cancel":
            shell.do(shell.run.cancel())
        elif shell.given_up:
            shell.do(shell.run.responded(shell.given_up[0], shell.fresh(names), True))
    shell.do(shell.run.cancel())
    for call in shell.given_up:
        # A cancelled call may still respond; the response is dropped.
        tried["late"] += 1
        shell.do(shell.run.responded(call, shell.fresh(name for _, name in call.step.outputs), True))
        shell.do(shell.run.failed(call))
    assert shell.ends == 1
    assert not shell.held
    assert shell.started.keys() <= shell.selection.steps.keys()


@settings(max_examples=200)
@given(graphs(), st.randoms(use_true_random=False))
def test_a_run_without_faults_runs_each_needed_step_once(graph, random):
    plan, asked = graph
    plan = without_streams(plan)
    shell = Shell(plan, asked)
    shell.begin({"X0", "X1"})
    while shell.calls:
        call = random.choice(shell.calls)
        tried["answer"] += 1
        shell.answer(call, [name for _, name in call.step.outputs])
    assert shell.started == dict.fromkeys(shell.selection.steps, 1)
    assert (len(shell.responses), shell.ends, shell.is_deadlock, shell.held) == (1, 1, False, set())


def without_streams(plan):
    """The same steps, none of them decoupled."""
    steps = [(step.model, [name for name, _ in step.inputs], [name for name, _ in step.outputs]) for step in plan.steps]
    return plan_of(steps, sorted(plan.inputs), plan.outputs)
