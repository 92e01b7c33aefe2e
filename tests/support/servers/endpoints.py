"""`Endpoints`: the addresses of a gateway, and requests to them."""

from __future__ import annotations

import contextlib
import re
import urllib.error
import urllib.request
from collections import Counter

import tritonclient.grpc
import tritonclient.http


class Endpoints:
    """Three places, each as `host:port`."""

    def __init__(self, http_place: str, grpc_place: str, metrics_place: str) -> None:
        self.http_place = http_place
        self.grpc_place = grpc_place
        self.metrics_place = metrics_place

    @property
    def port(self) -> int:
        """The port for HTTP."""
        return int(self.http_place.rpartition(":")[2])

    def http(self, timeout_s: float = 40.0) -> tritonclient.http.InferenceServerClient:
        """A stock client over HTTP; to be closed."""
        return tritonclient.http.InferenceServerClient(
            self.http_place, network_timeout=timeout_s, connection_timeout=timeout_s
        )

    def grpc(self) -> tritonclient.grpc.InferenceServerClient:
        """A stock client over gRPC; to be closed."""
        return tritonclient.grpc.InferenceServerClient(self.grpc_place)

    def get(self, path: str) -> tuple[int, bytes]:
        """(status, body) of a GET."""
        return _get(f"http://{self.http_place}{path}")

    def is_ready(self, model: str = "") -> bool:
        """Whether it says that it is ready, for this model or for all."""
        with contextlib.suppress(OSError):
            return self.get(f"/v2/models/{model}/ready" if model else "/v2/health/ready")[0] == 200
        return False

    def metrics_page(self) -> str:
        """What Prometheus would read."""
        status, page = _get(f"http://{self.metrics_place}/metrics")
        assert status == 200
        return page.decode()

    def metrics(self) -> Counter[tuple[str, str]]:
        """The value of each metric by (name, model), summed over its other labels; model "" where it has none."""
        values: Counter[tuple[str, str]] = Counter()
        for line in self.metrics_page().splitlines():
            if not line.startswith("#"):
                name, _, rest = line.partition("{")
                labels, _, value = rest.rpartition("} ") if rest else ("", "", line)
                found = re.search(r'model="([^"]*)"', labels)
                values[name.split(" ")[0], found[1] if found else ""] += float(value.rpartition(" ")[2])  # type: ignore[assignment]
        return values

    def in_flight(self) -> float:
        """Requests the gateway holds without an answer."""
        return self.metrics()["weir_gateway_in_flight", ""]


def _get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=15) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
