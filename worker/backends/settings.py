"""`BackendSettings`: the parsed values of `--backend-config`."""

from __future__ import annotations

from collections.abc import Iterable

from weir.repository.completion import DEFAULT_MAX_BATCH_SIZE

MAX_BATCH_SIZE_SETTING = "default-max-batch-size"
"""Triton's setting for the `max_batch_size` of models that can batch and whose configuration does not set it."""


class BackendSettings:
    """Settings by backend, from texts `<backend>,<setting>=<value>`, or `<setting>=<value>` for all backends.

    The last value of a setting counts. Raises ValueError, in Triton's words, for a malformed text and for an invalid
    `default-max-batch-size`.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._by_backend: dict[str, dict[str, str]] = {}
        for text in texts:
            backend, setting, value = parse_setting(text)
            self._by_backend.setdefault(backend, {})[setting] = value
        for settings in self._by_backend.values():
            _max_batch_size(settings)

    def of(self, *backends: str) -> dict[str, str]:
        """The settings for all backends, overridden by those of each of `backends`, later ones last."""
        merged = dict(self._by_backend.get("", {}))
        for backend in backends:
            merged |= self._by_backend.get(backend, {})
        return merged

    def default_max_batch_size(self, *backends: str) -> int:
        """The value of `MAX_BATCH_SIZE_SETTING`, 4 by default. With 0 models are completed without batching."""
        return _max_batch_size(self.of(*backends))


def parse_setting(text: str) -> tuple[str, str, str]:
    """(backend, setting, value) of one `--backend-config`; backend "" is all. Raises ValueError in Triton's words."""
    backend, comma, setting = text.partition(",")
    if comma and not backend:
        raise ValueError(
            "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
            f"<setting>=<value>. Got {text}"
        )
    if not comma:
        backend, setting = "", text
    key, equals, value = setting.partition("=")
    if not (key and equals and value):
        raise ValueError(f"--backend-config option format is '<backend name>,<setting>=<value>'. Got {text}")
    return backend, key, value


def _max_batch_size(settings: dict[str, str]) -> int:
    text = settings.get(MAX_BATCH_SIZE_SETTING)
    if text is None:
        return DEFAULT_MAX_BATCH_SIZE
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"--backend-config: {MAX_BATCH_SIZE_SETTING} must be a number of at least 0. Got {text}")
    return int(text)
