"""`urls_of`: the URLs of a gateway's ports, for people."""

from __future__ import annotations

from collections.abc import Mapping

from weir.gateway.settings import GatewaySettings

_FORMS = {
    "http": "http{}://{}:{}",
    "grpc": "grpc{}://{}:{}",
    "metrics": "http{}://{}:{}/metrics",
    "sagemaker": "http{}://{}:{}",
    "vertex_ai": "http{}://{}:{}",
}


def urls_of(settings: GatewaySettings, ports: Mapping[str, int]) -> list[str]:
    """The URLs of the gateway that has these settings, where `ports` has "http_port", "grpc_port" and so on.

    An address that stands for all of a host's is shown as it is.
    """
    return [
        form.format("s" if _is_encrypted(settings, name) else "", getattr(settings, f"{name}_address"), port)
        for name, form in _FORMS.items()
        if (port := ports.get(f"{name}_port")) is not None
    ]


def _is_encrypted(settings: GatewaySettings, name: str) -> bool:
    return settings.has_tls or (name == "grpc" and (settings.grpc_use_ssl or settings.grpc_use_ssl_mutual))
