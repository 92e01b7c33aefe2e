"""Each contained site names a handler that its class has, and that takes what the site was called with."""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter
from typing import Any

import pytest

from tests.support.contained_sites import SITES


def owner_of(site: str) -> Any:
    module, _, path = site.partition(":")
    return attrgetter(path.rpartition(".")[0])(importlib.import_module(module))


@pytest.mark.parametrize("name", sorted(site.name for site in SITES.values() if site.on_error))
def test_the_handler_takes_the_error_and_the_arguments(name: str) -> None:
    site = SITES[name]
    handler = getattr(owner_of(name), site.on_error)
    assert not inspect.iscoroutinefunction(handler)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(site.function).parameters.values())
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    required = [parameter for parameter in positional if parameter.default is inspect.Parameter.empty]
    for count in {len(required), len(positional)}:  # with its optional arguments and without
        inspect.signature(handler).bind("self", "error", *range(count - 1))
