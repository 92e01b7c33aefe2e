"""What of a process's payloads other hosts get, and which models they can't call."""

from __future__ import annotations

import pytest

from weir.bus.naming.identity import own_id
from weir.bus.payloads.arena import INLINE_LIMIT_BYTES, REMOTE_INLINE_LIMIT_BYTES
from weir.bus.payloads.reach import MAX_INLINE_RESPONSE_BYTES, PayloadReach
from weir.schemas.config.model_config import ModelOutput

MIB = 1 << 20


class Broker:
    def __init__(self, max_payload_bytes: int) -> None:
        self.max_payload_bytes = max_payload_bytes


def reach(is_served: bool, max_payload_bytes: int = 8 * MIB) -> PayloadReach:
    made = PayloadReach()
    made.set(Broker(max_payload_bytes), is_served)  # type: ignore[arg-type]
    return made


def output(datatype: str, *dims: int) -> ModelOutput:
    return ModelOutput(name="OUT", data_type=datatype, dims=list(dims))  # type: ignore[arg-type]


def test_without_an_address_content_for_other_hosts_travels_in_messages() -> None:
    served, unserved = reach(is_served=True), reach(is_served=False)
    assert (
        served.inline_limit_bytes(is_shared=True) == unserved.inline_limit_bytes(is_shared=True) == INLINE_LIMIT_BYTES
    )
    assert served.inline_limit_bytes(is_shared=False) == REMOTE_INLINE_LIMIT_BYTES
    assert unserved.inline_limit_bytes(is_shared=False) > 1 << 40
    here, elsewhere = own_id("gateway", None), "gateway-01234567-1_1"
    assert [each.includes(name) for each in (served, unserved) for name in (here, elsewhere)] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("max_payload_bytes", "message_bytes"), [(8 * MIB, MAX_INLINE_RESPONSE_BYTES), (MIB, MIB - 65_536)]
)
def test_a_response_is_no_larger_than_the_broker_takes(max_payload_bytes: int, message_bytes: int) -> None:
    assert reach(is_served=True, max_payload_bytes=max_payload_bytes).message_bytes == message_bytes


@pytest.mark.parametrize(
    ("outputs", "least_bytes"),
    [
        ([output("TYPE_FP32", 1024, 1025)], 4 * 1024 * 1025),
        ([output("TYPE_STRING", 2 * MIB)], 8 * MIB),
        ([output("TYPE_FP64", MIB), output("TYPE_UINT8", 5 * MIB)], 5 * MIB),
    ],
)
def test_a_model_whose_every_output_is_too_large_stays_on_its_host(
    outputs: list[ModelOutput], least_bytes: int
) -> None:
    problem = reach(is_served=False).problem_of(outputs)
    assert f"at least {least_bytes} bytes" in problem
    assert "--payload-listen" in problem
    assert reach(is_served=True).problem_of(outputs) == ""


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [output("TYPE_FP32", 1024, 1024)],
        [output("TYPE_FP32", -1, 1 << 30)],
        [output("TYPE_FP32", 1 << 30), output("TYPE_FP32", 1)],
        [output("TYPE_INVALID", 1 << 30)],
    ],
    ids=["none", "as large as a message", "a variable size", "one is small", "unknown"],
)
def test_other_models_can_be_called_from_other_hosts(outputs: list[ModelOutput]) -> None:
    assert reach(is_served=False).problem_of(outputs) == ""
