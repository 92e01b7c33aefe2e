"""The certificate that `weir serve` signs itself, and what the start block says of TLS."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from tests.support.servers.certificates import Authority
from weir.commands.local import certificates
from weir.commands.local.certificates import ServedTls, check_self_signed, self_signed_values
from weir.commands.preflight import Listener
from weir.commands.serve import StartupFacts, render_startup_block
from weir.errors import StartError
from weir.options import UsageError
from weir.runtime.certificates import fingerprint

NO_OPTIONS: dict[str, Any] = {
    "tls_cert": "",
    "tls_key": "",
    "tls_self_signed": False,
    "grpc_use_ssl": False,
    "grpc_use_ssl_mutual": False,
    "grpc_server_cert": "",
}


def made(folder: Path, *addresses: str) -> Path:
    """The file of the certificate for a server that listens there."""
    values = self_signed_values(folder, [Listener("HTTP", address, 0) for address in addresses])
    assert Path(values["tls_key"]).parent == Path(values["tls_cert"]).parent
    return Path(values["tls_cert"])


def names(cert: Path) -> set[str]:
    found = x509.load_pem_x509_certificate(cert.read_bytes())
    shown = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {*shown.get_values_for_type(x509.DNSName), *map(str, shown.get_values_for_type(x509.IPAddress))}


def test_it_has_the_names_of_this_host_and_is_private(tmp_path: Path) -> None:
    cert = made(tmp_path / "data", "0.0.0.0", "10.1.2.3", "127.0.0.2", "Weir.example", "::")
    own = {"localhost", "127.0.0.1", "::1", socket.gethostname().lower()}
    assert names(cert) == {*own, "10.1.2.3", "127.0.0.2", "weir.example"}
    assert ipaddress.ip_address("10.1.2.3") in x509.load_pem_x509_certificate(
        cert.read_bytes()
    ).extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.IPAddress)
    for path in cert.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cert.parent.stat().st_mode) == 0o700
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, cert.with_name("key.pem"))


def test_it_is_kept_for_the_next_start(tmp_path: Path) -> None:
    first = made(tmp_path, "127.0.0.1").read_bytes()
    assert made(tmp_path, "127.0.0.1", "0.0.0.0").read_bytes() == first


def test_other_names_make_a_new_one(tmp_path: Path) -> None:
    first = made(tmp_path, "127.0.0.1").read_bytes()
    assert made(tmp_path, "10.1.2.3").read_bytes() != first


@pytest.mark.parametrize("broken", ["cert.pem", "key.pem"])
def test_a_broken_one_is_made_anew(tmp_path: Path, broken: str) -> None:
    cert = made(tmp_path, "127.0.0.1")
    first = cert.read_bytes()
    if broken == "cert.pem":
        cert.write_text("no certificate")
    else:
        cert.with_name(broken).unlink()
    assert made(tmp_path, "127.0.0.1").read_bytes() != first


def test_one_that_ends_soon_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "VALID_DAYS", 5)
    first = made(tmp_path, "127.0.0.1")
    ends = x509.load_pem_x509_certificate(first.read_bytes()).not_valid_after_utc
    monkeypatch.undo()
    later = x509.load_pem_x509_certificate(made(tmp_path, "127.0.0.1").read_bytes()).not_valid_after_utc
    assert later - ends > datetime.timedelta(days=300)


def test_a_folder_that_others_may_write_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls").chmod(0o777)
    with pytest.raises(StartError, match="--tls-self-signed can't use the data folder"):
        made(tmp_path, "127.0.0.1")


def test_options_that_contradict_it_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check_self_signed(NO_OPTIONS)
    with pytest.raises(UsageError, match="leave out --tls-cert"):
        check_self_signed({**NO_OPTIONS, "tls_self_signed": True, "tls_cert": "a.pem"})
    monkeypatch.setattr(certificates, "is_installed", lambda _extra: False)
    with pytest.raises(StartError, match=r"--tls-self-signed needs the extra access: pip install"):
        check_self_signed({**NO_OPTIONS, "tls_self_signed": True})


def block(tls: ServedTls, http: str = "127.0.0.1:8000") -> list[list[str]]:
    facts: dict[str, Any] = {
        "http": http,
        "grpc": "127.0.0.1:8001",
        "metrics": "127.0.0.1:8002",
        "console": "127.0.0.1:8080",
        "platforms": {"SageMaker": "127.0.0.1:8088"},
        "nats_url": "nats://127.0.0.1:4222",
        "data_dir": "/data",
        "models": [],
        "durability": {},
    }
    return [line.split() for line in render_startup_block(StartupFacts(**facts, tls=tls)).splitlines()]


def test_the_start_block_has_the_fingerprint_and_a_request_to_try(tmp_path: Path) -> None:
    cert = made(tmp_path, "127.0.0.1")
    lines = block(ServedTls.of({**NO_OPTIONS, "tls_cert": str(cert), "tls_self_signed": True}))
    for row in (
        ["HTTP", "https://127.0.0.1:8000"],
        ["gRPC", "grpcs://127.0.0.1:8001"],
        ["metrics", "https://127.0.0.1:8002/metrics"],
        ["console", "https://127.0.0.1:8080"],
        ["SageMaker", "https://127.0.0.1:8088"],
        ["try", "curl", "--cacert", str(cert), "https://localhost:8000/v2"],
    ):
        assert row in lines
    command = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", str(cert)]
    expected = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().partition("=")[2]
    assert ["certificate", "SHA-256", expected] in lines
    assert fingerprint(cert.read_text()) == expected


def test_a_given_certificate_needs_no_request_to_try(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    lines = block(ServedTls.of({**NO_OPTIONS, "tls_cert": str(pair.cert)}))
    assert ["certificate", "SHA-256", fingerprint(pair.cert.read_text())] in lines
    assert "try" not in [line[0] for line in lines if line]


def test_grpc_alone_may_be_encrypted(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    tls = ServedTls.of({**NO_OPTIONS, "grpc_use_ssl": True, "grpc_server_cert": str(pair.cert)})
    assert ["gRPC", "grpcs://127.0.0.1:8001"] in block(tls)
    assert ["HTTP", "http://127.0.0.1:8000"] in block(tls)
    assert tls.announced() == {"grpc_tls_cert": str(pair.cert)}


def test_the_request_to_try_is_to_an_address_where_the_server_listens(tmp_path: Path) -> None:
    cert = made(tmp_path, "10.1.2.3")
    tls = ServedTls(str(cert), str(cert), True)
    places = ("10.1.2.3:8000", "0.0.0.0:8000", "[::1]:8000")
    tries = [line[-1] for http in places for line in block(tls, http) if line[:1] == ["try"]]
    assert tries == ["https://10.1.2.3:8000/v2", "https://localhost:8000/v2", "https://localhost:8000/v2"]
