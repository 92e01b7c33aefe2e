"""A foreign web page can't make a browser change anything on the server; programs are not affected."""

import json
from typing import Any

import pytest

from tests.support.gateway.http_frontend import HttpFrontend, run
from weir.gateway.cross_site import CrossSiteCheck

LOAD = "/v2/repository/models/evil/load"
INFER = "/v2/models/m/infer"


def headers(**named: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]


def refuses(check: CrossSiteCheck = CrossSiteCheck(), method: str = "POST", path: str = LOAD, **named: str) -> bool:  # noqa: B008
    return bool(check.rejection(method, path, headers(**named)))


@pytest.mark.parametrize(
    "host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "weir", "weir:8000", "a.localhost", "10.0.0.7"]
)
def test_programs_are_not_rejected(host: str) -> None:
    assert not refuses(host=host)
    assert not refuses()  # HTTP/1.0 has no Host


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_from_another_site_are_rejected(method: str, site: str) -> None:
    assert refuses(method=method, host="localhost:8000", sec_fetch_site=site)


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:3000", "null", "x"])
def test_a_foreign_origin_is_rejected(origin: str) -> None:
    assert refuses(host="localhost:8000", origin=origin)


@pytest.mark.parametrize("port", ["9" * 5000, "²", "65536000", "", "-1"])
def test_a_malformed_port_is_rejected_without_an_exception(port: str) -> None:
    assert refuses(host=f"localhost:{port}", origin="http://localhost:8000")
    assert refuses(host="localhost:8000", origin=f"http://localhost:{port or 'x'}")


def test_a_rejection_repeats_only_the_beginning_of_what_was_sent() -> None:
    long = "http://evil.example/" + "a" * 60_000
    for more in ({}, {"sec_fetch_site": "cross-site"}):
        assert len(CrossSiteCheck().rejection("POST", LOAD, headers(host="x", origin=long, **more))) < 400


def test_a_page_of_the_server_itself_is_not_rejected() -> None:
    assert not refuses(host="localhost:8000", origin="http://localhost:8000", sec_fetch_site="same-origin")
    assert not refuses(host="[::1]:8000", origin="http://[::1]:8000")
    assert not refuses(host="127.0.0.1", origin="http://127.0.0.1")
    assert not refuses(host="localhost", origin="https://localhost")


def test_a_rebound_name_is_rejected() -> None:
    """DNS rebinding: the browser considers the page and the server one origin."""
    assert refuses(host="evil.example:8000", origin="http://evil.example:8000")
    assert refuses(host="evil.example:8000", origin="http://evil.example:8000", sec_fetch_site="same-origin")
    assert refuses(host="evil.example:8000")


def test_elsewhere_than_on_loopback_programs_may_use_any_name() -> None:
    everywhere = CrossSiteCheck(address="10.0.0.7")
    assert not refuses(everywhere, host="weir.default.svc.cluster.local:8000")
    assert refuses(everywhere, host="evil.example:8000", origin="http://evil.example:8000")


def test_allowed_hosts_and_origins() -> None:
    check = CrossSiteCheck(["weir.example.com", "*.internal"], ["https://console.example.com"])
    assert not refuses(check, host="weir.example.com", origin="https://weir.example.com")
    assert not refuses(check, host="WEIR.example.com:8000")
    assert not refuses(check, host="a.b.internal")
    assert refuses(check, host="internal.evil.example")
    assert refuses(check, host="example.com")
    assert not refuses(check, host="x", origin="https://console.example.com", sec_fetch_site="cross-site")
    assert not refuses(check, host="x", origin="https://console.example.com:443")
    assert refuses(check, host="x", origin="http://console.example.com")
    assert not refuses(CrossSiteCheck(["*"], ["*"]), host="a.b", origin="https://c.d", sec_fetch_site="cross-site")


@pytest.mark.parametrize(
    ("hosts", "origins"), [(["a b"], []), (["a:80"], []), ([], ["console.example.com"]), ([], ["ftp://a"])]
)
def test_options_that_are_no_hosts_or_origins(hosts: list[str], origins: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--allowed-(hosts|origins): '.*' is not a"):
        CrossSiteCheck(hosts, origins)


def test_reading_and_inference_are_not_checked() -> None:
    foreign = {"host": "evil.example", "origin": "http://evil.example", "sec_fetch_site": "cross-site"}
    assert not refuses(method="GET", **foreign)
    assert not refuses(path=INFER, **foreign)
    assert not refuses(path="/v2/models/m/versions/3/generate_stream", **foreign)
    assert refuses(path=INFER, prefer="respond-async", **foreign)  # it leaves a job behind
    assert refuses(path=INFER + "/x", **foreign)


@pytest.mark.parametrize(
    ("path", "status"), [(LOAD, 403), ("/v2/jobs/1/cancel", 403), ("/v2/systemsharedmemory/unregister", 403)]
)
def test_routes_reject_with_a_reason(path: str, status: int) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        answer: dict[str, Any] = {}
        reader, writer = await frontend.open()
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Origin: http://evil.example",
            "Content-Length: 2",
            "",
            "{}",
        ]
        writer.write("\r\n".join(lines).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        answer = json.loads(await reader.readuntil(b"}"))
        assert head.startswith(f"HTTP/1.1 {status} ")
        assert answer["error"].startswith("a request from another site ('http://evil.example') is refused")
        writer.close()

    run(scenario)
