"""`Exposure`: which ports other hosts can reach without TLS, or without an access policy."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple


class Exposure(NamedTuple):
    """The names of the listeners that other hosts can reach, and of those among them without TLS."""

    reachable: tuple[str, ...]
    without_tls: tuple[str, ...]
    has_policy: bool

    @classmethod
    def of(cls, listeners: Mapping[str, str], settings: Any) -> Exposure:
        """That of `listeners`, addresses by name ("HTTP", "GRPC" …), by the options in `settings`."""
        reachable = tuple(name for name, address in listeners.items() if not is_loopback(address))
        without = tuple(name for name in reachable if not has_tls(settings, name))
        return cls(reachable, without, bool(settings.access_policy))

    def warning(self) -> str:
        """What to tell the operator, "" for nothing."""
        if not self.reachable or (self.has_policy and not self.without_tls):
            return ""
        if self.has_policy:
            return (
                f"other hosts can reach {_listed(self.without_tls)} without TLS: keys and tokens can be read on the way"
            )
        tls = f", and {_listed(self.without_tls)} without TLS" if self.without_tls else ""
        return f"other hosts can reach {_listed(self.reachable)} without an access policy{tls}: docs/security.md"

    def refusal(self) -> str:
        """Why a server with --require-access-policy does not start, "" if it does."""
        if not self.reachable or self.has_policy:
            return ""
        return (
            f"--require-access-policy: other hosts can reach {_listed(self.reachable)} without an access policy; give "
            "--access-policy FILE, or listen on 127.0.0.1"
        )


def check_exposure(listeners: Mapping[str, str], settings: Any, logger: logging.Logger) -> None:
    """Logs what other hosts can reach unprotected. Raises ValueError if --require-access-policy forbids the start."""
    exposure = Exposure.of(listeners, settings)
    if settings.require_access_policy and exposure.refusal():
        raise ValueError(exposure.refusal())
    if exposure.warning():
        logger.warning("%s", exposure.warning())


def frontend_addresses(settings: Any) -> dict[str, str]:
    """The addresses of a gateway's listeners, by the names that users know."""
    names = {"http": "HTTP", "grpc": "GRPC", "metrics": "metrics", "sagemaker": "SageMaker", "vertex_ai": "Vertex AI"}
    return {
        name: getattr(settings, f"{prefix}_address")
        for prefix, name in names.items()
        if getattr(settings, f"allow_{prefix}")
    }


def has_tls(settings: Any, listener: str) -> bool:
    """Whether clients of this listener use TLS."""
    if listener == "GRPC" and getattr(settings, "grpc_use_ssl", False):
        return True
    return bool(getattr(settings, "tls_cert", "") or getattr(settings, "tls_self_signed", False))


def is_loopback(address: str) -> bool:
    """Whether only this host reaches what listens at `address`, a name or an IP address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
