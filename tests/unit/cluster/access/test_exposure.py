"""What a start says about ports that other hosts can reach, and when it is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from weir.cluster.access.exposure import Exposure, check_exposure, is_loopback

OPEN = {"HTTP": "0.0.0.0", "GRPC": "::", "metrics": "127.0.0.1"}


def options(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"access_policy": "", "require_access_policy": True, **given})


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_addresses_that_other_hosts_may_reach(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize(
    ("listeners", "given", "warning", "is_refused"),
    [
        ({"HTTP": "127.0.0.1"}, {}, "", False),
        (OPEN, {}, "HTTP and GRPC without an access policy, and HTTP and GRPC without TLS: docs/security.md", True),
        (OPEN, {"grpc_use_ssl": True}, "HTTP and GRPC without an access policy, and HTTP without TLS", True),
        (OPEN, {"tls_cert": "c"}, "HTTP and GRPC without an access policy: docs/security.md", True),
        (OPEN, {"access_policy": "p"}, "HTTP and GRPC without TLS: keys and tokens can be read on the way", False),
        (OPEN, {"access_policy": "p", "tls_self_signed": True}, "", False),
    ],
)
def test_what_is_said(
    listeners: dict[str, str], given: dict[str, Any], warning: str, is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    exposure = Exposure.of(listeners, options(**given))
    assert warning in exposure.warning()
    assert bool(exposure.warning()) is bool(warning)
    assert bool(exposure.refusal()) is is_refused
    logger = logging.getLogger("weir.access")
    if is_refused:
        with pytest.raises(ValueError, match=r"--require-access-policy: other hosts can reach HTTP and GRPC"):
            check_exposure(listeners, options(**given), logger)
    check_exposure(listeners, options(**given, require_access_policy=False), logger)
    assert [record.getMessage() for record in caplog.records] == ([exposure.warning()] if warning else [])
