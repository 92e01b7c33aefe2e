"""The rules of the three schedulers: dynamic batching, sequence batching, ensembles.

Texts and limits are those of Triton's load-time validation. Rules that need the configurations of composing models are
checked when the ensemble is loaded (`weir.worker.ensembles`).
"""

from __future__ import annotations

from collections.abc import Sequence

from weir.repository.completion import ENSEMBLE_PLATFORM
from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import (
    CHECKPOINT_EVERY,
    MAX_QUEUE_WAIT,
    DynamicBatching,
    EnsembleScheduling,
    InitialState,
    ModelConfig,
    QueuePolicy,
    SequenceBatching,
    SequenceControl,
    SequenceState,
)

MAX_CHECKPOINT_EVERY = 1000

MAX_STEPS = 1000
"""Steps of an ensemble. Triton has no limit, but one of 20 000 takes its worker a minute and a half."""

_FALSE_TRUE = ("int32_false_true", "fp32_false_true", "bool_false_true")
_EITHER = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
_CORRELATION_ID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def check_dynamic_batching(config: ModelConfig, batching: DynamicBatching) -> None:
    """Raises ConfigProblem for preferred sizes, priorities or queue policies that can't be."""
    path, name, levels = "dynamic_batching", config.name, batching.priority_levels
    _check_preferred(config, path, "dynamic batching preferred size", batching.preferred_batch_size)
    if levels > 0 and not 1 <= batching.default_priority_level <= levels:
        message = f"default priority level must be in range [1, {levels}] for {name}"
        raise ConfigProblem(f"{path}.default_priority_level", message)
    for level in batching.priority_queue_policy:
        # Without levels there is nothing that the policies would be for: Triton passes them over.
        if levels > 0 and not 1 <= level <= levels:
            message = f"priority queue policy must have priority level in range [1, {levels}] for {name}"
            raise ConfigProblem(f"{path}.priority_queue_policy", message)
    if not batching.preserve_ordering:
        return
    if levels > 1:
        message = f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        raise ConfigProblem(f"{path}.priority_levels", message)
    _check_no_delay(config, f"{path}.default_queue_policy", batching.default_queue_policy)
    for policy in batching.priority_queue_policy.values():
        _check_no_delay(config, f"{path}.priority_queue_policy", policy)


def _check_no_delay(config: ModelConfig, path: str, policy: QueuePolicy | None) -> None:
    # Without a default timeout there is none at all, for a request's own can only be smaller.
    if policy is not None and policy.timeout_action == "DELAY" and policy.default_timeout_microseconds:
        message = (
            f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {config.name}"
        )
        raise ConfigProblem(path, message)


def _check_preferred(config: ModelConfig, path: str, subject: str, sizes: Sequence[int]) -> None:
    path = f"{path}.preferred_batch_size"
    for size in sizes:
        if size <= 0:
            raise ConfigProblem(path, f"{subject} must be positive for {config.name}")
        if size > config.max_batch_size:
            raise ConfigProblem(path, f"{subject} must be <= max batch size for {config.name}")


def check_sequence_batching(config: ModelConfig, batching: SequenceBatching) -> None:
    """Raises ConfigProblem for a strategy, controls or states that can't be."""
    path, name = "sequence_batching", config.name
    # 0 is "not given": no minimum.
    if batching.direct is not None and not 0 <= batching.direct.minimum_slot_utilization <= 1:
        message = f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}"
        raise ConfigProblem(f"{path}.direct.minimum_slot_utilization", message)
    if batching.oldest is not None:
        subject = "sequence batching preferred batch size"
        _check_preferred(config, f"{path}.oldest", subject, batching.oldest.preferred_batch_size)
        if batching.oldest.max_candidate_sequences < 0:
            message = f"sequence batching max candidate sequences must be non-negative for {name}"
            raise ConfigProblem(f"{path}.oldest.max_candidate_sequences", message)
    _check_controls(config, batching)
    for index, state in enumerate(batching.state):
        _check_state(config, f"{path}.state[{index}]", state)
    _check_state_names(config, batching)
    _check_checkpoints(config, batching)


def _check_state_names(config: ModelConfig, batching: SequenceBatching) -> None:
    seen: set[str] = set()
    for index, state in enumerate(batching.state):
        if state.input_name in seen:
            message = f"State input name '{state.input_name}' specified more than once."
            raise ConfigProblem(f"sequence_batching.state[{index}].input_name", message)
        seen.add(state.input_name)


def _check_controls(config: ModelConfig, batching: SequenceBatching) -> None:
    tensors: set[str] = set()
    kinds: set[str] = set()
    for index, control_input in enumerate(batching.control_input):
        path = f"sequence_batching.control_input[{index}]"
        if not control_input.name:
            raise ConfigProblem(path, f"sequence batching control tensor must have a name for {config.name}")
        if control_input.name in tensors:
            subject = f"sequence batching control tensor '{control_input.name}'"
            raise ConfigProblem(path, f"{subject} is specified for multiple control kinds for {config.name}")
        tensors.add(control_input.name)
        if len(control_input.control) != 1:
            message = f"sequence batching control tensor '{control_input.name}' must have 1 control for {config.name}"
            raise ConfigProblem(path, message)
        control = control_input.control[0]
        if control.kind in kinds:
            message = f"sequence batching specifies multiple {control.kind} tensors for {config.name}"
            raise ConfigProblem(f"{path}.control[0].kind", message)
        kinds.add(control.kind)
        _check_control(config, f"{path}.control[0]", control)


def _check_control(config: ModelConfig, path: str, control: SequenceControl) -> None:
    of = f"for {control.kind} for {config.name}"
    given = {field: values for field in _FALSE_TRUE if (values := getattr(control, field))}
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        if given:
            raise ConfigProblem(path, f"sequence batching must not specify either {_EITHER} {of}")
        if control.data_type not in _CORRELATION_ID_TYPES:
            types = ", ".join(_CORRELATION_ID_TYPES[:-1])
            message = (
                f"unexpected data type for control {control.kind} for {config.name}. "
                f"Allowed data types are {types} and {_CORRELATION_ID_TYPES[-1]}"
            )
            raise ConfigProblem(f"{path}.data_type", message)
        return
    if not given:
        raise ConfigProblem(path, f"sequence batching must specify either {_EITHER} {of}")
    if len(given) > 1:
        fields = "'int32_false_true', 'fp32_false_true' and 'bool_false_true'"
        raise ConfigProblem(path, f"sequence batching specifies more than one from {fields} {of}")
    for field, values in given.items():
        if len(values) != 2:
            message = f"sequence batching control '{field}' must have exactly 2 entries {of}"
            raise ConfigProblem(f"{path}.{field}", message)


def _check_state(config: ModelConfig, path: str, state: SequenceState) -> None:
    if not state.input_name or not state.output_name:
        message = f"sequence batching state must specify 'input_name' and 'output_name' for {config.name}"
        raise ConfigProblem(path, message)
    subject = f"sequence batching state '{state.input_name}'"
    if state.data_type == "TYPE_INVALID":
        raise ConfigProblem(f"{path}.data_type", f"{subject} must specify 'data_type' for {config.name}")
    if any(dim < 1 and dim != -1 for dim in state.dims):
        raise ConfigProblem(f"{path}.dims", f"{subject} dimension must be >= 1 or -1 for {config.name}")
    if len(state.initial_state) > 1:
        raise ConfigProblem(f"{path}.initial_state", f"{subject} must have at most 1 initial state for {config.name}")
    for initial in state.initial_state:
        problem = _initial_state_problem(state, initial)
        if problem:
            raise ConfigProblem(f"{path}.initial_state", problem)


def _initial_state_problem(state: SequenceState, initial: InitialState) -> str:
    """What is wrong with the first value of a state, in Triton's words and in its order; "" for nothing."""
    name, dims = state.input_name, initial.dims
    if initial.data_type != state.data_type:
        return f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
    if not initial.name:
        return f"Field 'name' must be set when using initial_state for state input '{name}'."
    if len(dims) != len(state.dims):
        return (
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(dims)} != {len(state.dims)}"
        )
    for given, declared in zip(dims, state.dims, strict=True):
        if given < 1:
            return f"'initial_state' field for state input name '{name}' contains variable dimensions."
        if declared not in (-1, given):
            differs = f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description."
            return f"{differs} {given} != {declared}"
    if initial.zero_data is None and not initial.data_file:
        return f"initial_state setting expects state'{name}' to have initial_state data"
    return ""


def _check_checkpoints(config: ModelConfig, batching: SequenceBatching) -> None:
    if CHECKPOINT_EVERY not in config.parameters:
        return
    path = f'parameters["{CHECKPOINT_EVERY}"]'
    if not 1 <= config.checkpoint_every <= MAX_CHECKPOINT_EVERY:
        message = f"'{CHECKPOINT_EVERY}' must be a number in range [1, {MAX_CHECKPOINT_EVERY}] for {config.name}"
        raise ConfigProblem(path, message)
    if not batching.state:
        raise ConfigProblem(path, f"'{CHECKPOINT_EVERY}' needs implicit states, which {config.name} has not")


def check_queue_wait(config: ModelConfig) -> None:
    """Raises ConfigProblem for a longest wait that is none, or of a model whose requests can't be refused one by one."""
    if MAX_QUEUE_WAIT not in config.parameters:
        return
    path = f'parameters["{MAX_QUEUE_WAIT}"]'
    if config.max_queue_wait_us is None:
        raise ConfigProblem(path, f"'{MAX_QUEUE_WAIT}' must be a number of microseconds for {config.name}")
    if config.sequence_batching is not None:
        raise ConfigProblem(path, f"'{MAX_QUEUE_WAIT}' is not for models with sequences, as {config.name} is")


def check_ensemble(config: ModelConfig) -> None:
    """Raises ConfigProblem for an ensemble without steps, and for steps whose tensors do not connect."""
    scheduling, name = config.ensemble_scheduling, config.name
    if scheduling is None:
        if config.platform == ENSEMBLE_PLATFORM:
            message = f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
            raise ConfigProblem("platform", message)
        return
    if config.platform != ENSEMBLE_PLATFORM:
        message = f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
        raise ConfigProblem("ensemble_scheduling", message)
    if config.instance_group:
        raise ConfigProblem("instance_group", f"instance group should not be specified for ensemble '{name}'")
    if config.optimization is not None:
        raise ConfigProblem("optimization", f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise ConfigProblem("model_warmup", f"model_warmup can not be specified for ensemble '{name}'")
    _check_steps(name, scheduling)
    _check_written_once(config, scheduling)
    consumed = {tensor for step in scheduling.step for tensor in step.input_map.values()}
    connected = _connected(config, scheduling)
    _check_ends(config, scheduling, consumed, connected)
    _check_used(config, scheduling, consumed & connected)


def _check_steps(name: str, scheduling: EnsembleScheduling) -> None:
    """Raises ConfigProblem for an ensemble without steps, and for an incomplete step."""
    if not scheduling.step:
        raise ConfigProblem("ensemble_scheduling", f"must specify 'step' for ensemble '{name}'")
    if len(scheduling.step) > MAX_STEPS:
        message = f"ensemble '{name}' has {len(scheduling.step)} steps, at most {MAX_STEPS} are allowed"
        raise ConfigProblem("ensemble_scheduling", message)
    for index, step in enumerate(scheduling.step):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                message = f"must specify '{field}' in step {index} of ensemble '{name}'"
                raise ConfigProblem(f"ensemble_scheduling.step[{index}].{field}", message)


def _check_written_once(config: ModelConfig, scheduling: EnsembleScheduling) -> None:
    """Raises ConfigProblem for a tensor that several steps, or a client and a step, write."""
    name = config.name
    written = {tensor.name for tensor in config.input}
    for index, step in enumerate(scheduling.step):
        for tensor in step.output_map.values():
            if tensor in written:
                message = (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' "
                    f"step {index}"
                )
                raise ConfigProblem(f"ensemble_scheduling.step[{index}].output_map", message)
            written.add(tensor)


def _check_ends(config: ModelConfig, scheduling: EnsembleScheduling, consumed: set[str], connected: set[str]) -> None:
    """Raises ConfigProblem for an input of the ensemble that no step uses, and an output that no step writes."""
    name = config.name
    mapped = consumed | {tensor for step in scheduling.step for tensor in step.output_map.values()}
    # The missing quotation mark is missing in Triton, too.
    for index, given in enumerate(config.input):
        if given.name not in mapped:
            message = f"ensemble input '{given.name}' for ensemble {name}' is not used"
            raise ConfigProblem(f"input[{index}].name", message)
    for index, output in enumerate(config.output):
        if output.name not in mapped:
            message = f"ensemble output '{output.name}' for ensemble {name}' is not used"
            raise ConfigProblem(f"output[{index}].name", message)
        if output.name not in connected:
            message = f"output '{output.name}' for ensemble '{name}' is not written"
            cause = _unconnected_cause(output.name, scheduling, connected)
            if cause != output.name:
                message += f": at least one of its depending tensors, '{cause}', is not connected"
            raise ConfigProblem(f"output[{index}].name", message)


def _check_used(config: ModelConfig, scheduling: EnsembleScheduling, used: set[str]) -> None:
    """Raises ConfigProblem for a tensor that is neither an output of the ensemble nor `used` by a step."""
    for index, step in enumerate(scheduling.step):
        for field, tensors in (("output_map", step.output_map.values()), ("input_map", step.input_map.values())):
            for tensor in tensors:
                if tensor not in config.output_by_name and tensor not in used:
                    message = f"ensemble tensor '{tensor}' is unused in ensemble '{config.name}'"
                    raise ConfigProblem(f"ensemble_scheduling.step[{index}].{field}", message)


def _connected(config: ModelConfig, scheduling: EnsembleScheduling) -> set[str]:
    """The tensors that are written when the ensemble runs: not those of steps in a cycle, or behind an unknown tensor."""
    ready = {tensor.name for tensor in config.input}
    waiting = list(scheduling.step)
    while runnable := [step for step in waiting if ready.issuperset(step.input_map.values())]:
        waiting = [step for step in waiting if step not in runnable]
        for step in runnable:
            ready.update(step.output_map.values())
    return ready


def _unconnected_cause(tensor: str, scheduling: EnsembleScheduling, connected: set[str]) -> str:
    """The first tensor on the way back from `tensor` that no step writes, or the last one before a cycle closes."""
    writers = {output: step for step in scheduling.step for output in step.output_map.values()}
    seen: set[str] = set()
    while (step := writers.get(tensor)) is not None:
        before = next((t for t in step.input_map.values() if t not in connected and t not in seen), None)
        if before is None:
            break
        seen.add(before)
        tensor = before
    return tensor
