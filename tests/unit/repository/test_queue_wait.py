"""`weir_max_queue_wait_us` in a configuration: a number, and for models whose requests stand alone."""

import pytest

from repository.problem import ConfigProblem
from repository.scheduler_rules import check_queue_wait
from schemas.model_config import ModelConfig


def config(text: str, **more: object) -> ModelConfig:
    parameters = {"weir_max_queue_wait_us": {"string_value": text}}
    return ModelConfig.model_validate({"name": "m", "parameters": parameters, **more})


def test_a_number_of_microseconds_is_one() -> None:
    for text, us in (("0", 0), ("50000", 50_000)):
        check_queue_wait(config(text))
        assert config(text).max_queue_wait_us == us
    check_queue_wait(ModelConfig(name="m"))
    assert ModelConfig(name="m").max_queue_wait_us is None


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1s", "٣", "9" * 13])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigProblem, match="must be a number of microseconds"):
        check_queue_wait(config(text))


def test_sequences_are_not_refused_request_by_request() -> None:
    with pytest.raises(ConfigProblem, match="not for models with sequences"):
        check_queue_wait(config("1", sequence_batching={"direct": {}}))
