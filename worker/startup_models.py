"""The models that a worker begins with in explicit mode: those that `--load-model` names."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.errors import invalid
from schemas.model_identity import plain_name

_ALL = ("*",)


def check_startup_models(mode: str, names: tuple[str, ...]) -> None:
    """Raises INVALID_ARG, in Triton's words, for start-up models that can't be."""
    if names and mode != "explicit":
        raise invalid("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in names and names != _ALL:
        raise invalid("Wildcard model name '*' must be the ONLY startup model if specified at all.")


def wanted_at_start(names: tuple[str, ...], found: Iterable[str]) -> list[str]:
    """The identities that `names` mean among those that were `found`: all of a name; a name that is not there as it is."""
    identities = list(found)
    if names == _ALL:
        return identities
    by_name: dict[str, list[str]] = {}
    for identity in identities:
        by_name.setdefault(plain_name(identity), []).append(identity)
    return [identity for name in dict.fromkeys(names) for identity in by_name.get(name, [name])]
