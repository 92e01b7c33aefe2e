"""`CacheConfig`: the response cache that `--cache-config` configures.

Source: Triton's option `--cache-config <cache name>,<setting>=<value>`, which may be repeated, and its texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LOCAL, NATS = "local", "nats"

_SETTINGS = {LOCAL: {"size"}, NATS: {"size", "ttl"}}
_MAX_SIZE_BYTES = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """A cache of `size_bytes`: LOCAL in each process, or NATS in the broker. `ttl_s` 0: entries do not expire."""

    kind: str
    size_bytes: int
    ttl_s: float = 0.0

    @classmethod
    def parse(cls, texts: Iterable[str]) -> CacheConfig | None:
        """The configuration from all values of the option, None without any. Raises ValueError in Triton's words.

        Each is a cache's name and one setting or several, `local,size=1048576` or `nats,size=1048576,ttl=60`.
        """
        by_cache: dict[str, dict[str, str]] = {}
        texts = list(texts)
        if len({text.split(",")[0] for text in texts}) > 1:
            raise ValueError("found multiple cache configurations, but only a single cache is currently supported")
        for text in texts:
            name, *settings = text.split(",")
            if name == "redis":
                raise ValueError(
                    "the cache 'redis' is not supported: use 'nats,size=BYTES', which all gateways share too"
                )
            if name not in _SETTINGS:
                raise ValueError(f"unable to find cache '{name}': use '{LOCAL}' or '{NATS}'")
            for setting in settings:
                key, _, value = setting.partition("=")
                if key not in _SETTINGS[name]:
                    raise ValueError(f"cache '{name}' has no setting '{key}'")
                by_cache.setdefault(name, {})[key] = value
        for name, values in by_cache.items():
            if "size" not in values:
                raise ValueError(f"Failed to initialize cache '{name}': config didn't contain a valid 'size' field.")
            return cls(name, _whole(name, "size", values["size"]), _whole(name, "ttl", values.get("ttl", "0"), least=0))
        return None


def _whole(cache: str, key: str, text: str, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= _MAX_SIZE_BYTES):
        raise ValueError(f"Failed to initialize cache '{cache}': '{text}' is not a valid '{key}'")
    return int(text)
