"""Errors come out of task groups as they were raised, whatever the release of Python."""

import pytest

from weir.named_broker import out_of_groups


def test_an_error_comes_out_of_its_groups() -> None:
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("away"), TimeoutError("late")])])
    with pytest.raises(OSError, match="away"), out_of_groups(OSError, TimeoutError):
        raise group


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ExceptionGroup, match="both"), out_of_groups(OSError):
        raise ExceptionGroup("both", [OSError("away"), ValueError("wrong")])
    with pytest.raises(ValueError, match="wrong"), out_of_groups(OSError):
        raise ValueError("wrong")
