"""`weir_max_queue_wait_us` in a configuration: a number, and for models whose requests stand alone."""

import pytest

from weir.repository.problems import ConfigProblem
from weir.repository.scheduler_rules import check_queue_wait
from weir.schemas.config.model_config import ModelConfig


def config(text: str, **more: object) -> ModelConfig:
    parameters = {"weir_max_queue_wait_us": {"string_value": text}}
    return ModelConfig.model_validate({"name": "m", "parameters": parameters, **more})


def test_a_valid_queue_wait() -> None:
    for text, us in (("0", 0), ("50000", 50_000)):
        check_queue_wait(config(text))
        assert config(text).max_queue_wait_us == us
    check_queue_wait(ModelConfig(name="m"))
    assert ModelConfig(name="m").max_queue_wait_us is None


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1s", "٣", "9" * 13])
def test_an_invalid_queue_wait(text: str) -> None:
    with pytest.raises(ConfigProblem, match="must be a number of microseconds"):
        check_queue_wait(config(text))


def test_models_of_sequences_have_no_queue_wait() -> None:
    with pytest.raises(ConfigProblem, match="not for models with sequences"):
        check_queue_wait(config("1", sequence_batching={"direct": {}}))
