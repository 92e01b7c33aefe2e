"""`--backend-config`: settings by backend, and Triton's errors for malformed ones."""

from __future__ import annotations

import pytest

from weir.worker.backends.settings import BackendSettings


def test_later_values_and_named_backends_take_precedence() -> None:
    settings = BackendSettings(["a=1", "b=1", "python,b=2", "a=3", "mine,b=4"])
    assert settings.of() == {"a": "3", "b": "1"}
    assert settings.of("python") == {"a": "3", "b": "2"}
    assert settings.of("python", "mine") == {"a": "3", "b": "4"}


def test_the_default_batch_size() -> None:
    assert BackendSettings().default_max_batch_size("onnxruntime") == 4
    settings = BackendSettings(["default-max-batch-size=8", "onnxruntime,default-max-batch-size=0"])
    assert settings.default_max_batch_size("pytorch") == 8
    assert settings.default_max_batch_size("onnxruntime") == 0


FORM = "--backend-config option format is '<backend name>,<setting>=<value>'. Got {}"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        *((text, FORM.format(text)) for text in ("foo", "a,", "python,a=", "=x", "a=b,c", "python,=c", "")),
        (
            ",a=b",
            "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
            "<setting>=<value>. Got ,a=b",
        ),
        (
            "python,default-max-batch-size=many",
            "--backend-config: default-max-batch-size must be a number of at least 0. Got many",
        ),
    ],
)
def test_malformed_settings_have_triton_s_errors(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        BackendSettings([text])
    assert str(refused.value) == complaint
