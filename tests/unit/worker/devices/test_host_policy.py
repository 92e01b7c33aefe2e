"""Host policies: cores and NUMA nodes of instances."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from weir.schemas.config.model_config import InstanceGroup
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.devices.host_policy import UNBOUND, HostPolicies, HostPolicy


def in_thread(call: Callable[[], None]) -> None:
    """Runs a function in a thread of its own."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-0", {0}), ("0-3,6", {0, 1, 2, 3, 6}), ("2-3,0-1", {0, 1, 2, 3}), ("5", {5}), ("1-0,2-2", {2})],
)
def test_cores(text: str, cores: set[int]) -> None:
    assert HostPolicy.of_settings({"cpu-cores": text}) == HostPolicy(frozenset(cores))


@pytest.mark.parametrize(
    ("setting", "text", "message"),
    [
        ("cpu-cores", "", "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got "),
        (
            "cpu-cores",
            "1-",
            "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got 1-",
        ),
        ("cpu-cores", "a-b", "Parsing 'cpu-cores' value: Can't parse 'a' to integer"),
        ("cpu-cores", "1-0", "Unable to set NUMA thread affinity: Invalid argument"),
        ("numa-node", "x", "Parsing 'numa-node' value: Can't parse 'x' to integer"),
    ],
)
def test_invalid_settings_are_rejected(setting: str, text: str, message: str) -> None:
    with pytest.raises(WeirError) as refused:
        HostPolicy.of_settings({setting: text})
    assert refused.value.message == message


def test_a_huge_range_costs_nothing() -> None:
    assert len(HostPolicy.of_settings({"cpu-cores": "0-999999999"}).cores) <= 1 << 13


def test_a_group_without_a_policy_has_that_of_its_kind() -> None:
    policies = HostPolicies([f"{name},cpu-cores={at}" for at, name in enumerate(("cpu", "model", "gpu_1", "mine"))])
    asked = [("KIND_CPU", ""), ("KIND_MODEL", ""), ("KIND_GPU", ""), ("KIND_GPU", "mine")]
    found = [policies.of(InstanceGroup(kind=kind, host_policy=name), 1).cores for kind, name in asked]  # type: ignore[arg-type]
    assert found == [{0}, {1}, {2}, {3}]
    assert policies.of(InstanceGroup(kind="KIND_GPU"), 0) == UNBOUND
    assert policies.of(InstanceGroup(kind="KIND_CPU", host_policy="unknown"), 0) == UNBOUND


def test_settings_of_a_policy_are_combined() -> None:
    policies = HostPolicies(["cpu,cpu-cores=0", "cpu,numa-node=0", "cpu,cpu-cores=1"])
    assert policies.of(InstanceGroup(kind="KIND_CPU"), 0) == HostPolicy(frozenset({1}), 0)


def test_a_thread_is_bound_and_unbound() -> None:
    everywhere = os.sched_getaffinity(0)
    core = max(everywhere)

    def bind() -> None:
        HostPolicy(frozenset({core})).bind()
        assert os.sched_getaffinity(0) == {core}
        assert HostPolicy.current().cores == {core}
        UNBOUND.bind()
        assert os.sched_getaffinity(0) == everywhere

    in_thread(bind)
    assert os.sched_getaffinity(0) == everywhere
    assert HostPolicy.current() == UNBOUND


def test_missing_cores_and_nodes_are_errors() -> None:
    with pytest.raises(WeirError, match="Unable to set NUMA thread affinity: Invalid argument") as refused:
        in_thread(HostPolicy(frozenset({8191})).bind)
    assert refused.value.code is ErrorCode.INTERNAL
    for node in (63, 64):
        with pytest.raises(WeirError, match="Unable to set NUMA memory policy: "):
            in_thread(HostPolicy(node=node).bind)
