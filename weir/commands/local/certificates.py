"""TLS of `weir serve`: the certificate that it signs itself (`--tls-self-signed`), and what the start block says of it."""

from __future__ import annotations

import datetime
import ipaddress
import shlex
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weir.commands.local.servers import is_at_loopback
from weir.commands.preflight import Listener
from weir.errors import StartError
from weir.options import UsageError
from weir.runtime.certificates import fingerprint
from weir.runtime.extras import is_installed, missing_extra
from weir.runtime.folders.private import private_folder, write_private

VALID_DAYS = 397
"""How long a self-signed certificate is valid: browsers accept no more."""

_RENEWED_DAYS = 30
"""A certificate that is valid for less than this is made anew at the start."""

_FOLDER, _CERT, _KEY = "tls", "cert.pem", "key.pem"


class ServedTls(NamedTuple):
    """The certificates of a server's ports: the absolute path of that of HTTP, and of that of gRPC; "" without TLS."""

    cert: str = ""
    grpc_cert: str = ""
    is_self_signed: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ServedTls:
        """Those in the values of the options of `weir serve`."""
        has_own = values["grpc_use_ssl"] or values["grpc_use_ssl_mutual"]
        grpc = values["grpc_server_cert"] if has_own else values["tls_cert"]
        return cls(_absolute(values["tls_cert"]), _absolute(grpc), values["tls_self_signed"])

    @property
    def http_scheme(self) -> str:
        """The scheme of the HTTP ports: "https" with TLS."""
        return "https" if self.cert else "http"

    def of_grpc(self, place: str) -> str:
        """The address ("host:port") of gRPC for people, with a scheme if it is encrypted."""
        return f"grpcs://{place}" if self.grpc_cert else place

    def announced(self) -> dict[str, str]:
        """What clients on this machine need to know: `tls_cert` and `grpc_tls_cert`, those that there are."""
        return {name: path for name, path in (("tls_cert", self.cert), ("grpc_tls_cert", self.grpc_cert)) if path}

    def rows(self, http: str | None) -> list[tuple[str, str]]:
        """The rows of the start block: the fingerprint, and with a self-signed certificate a request to try."""
        if not self.cert:
            return []
        try:
            rows = [("certificate", f"SHA-256 {fingerprint(Path(self.cert).read_text())}")]
        except (OSError, ValueError):  # it has been replaced meanwhile
            return []
        if self.is_self_signed and http:
            host, _, port = http.rpartition(":")
            host = "localhost" if is_at_loopback(host.strip("[]")) else host
            rows.append(("try", f"curl --cacert {shlex.quote(self.cert)} https://{host}:{port}/v2"))
        return rows


NO_TLS = ServedTls()


def check_self_signed(values: Mapping[str, Any]) -> None:
    """Raises UsageError where `--tls-self-signed` contradicts other options, StartError where it can't be had."""
    if not values["tls_self_signed"]:
        return
    if values["tls_cert"] or values["tls_key"]:
        raise UsageError("--tls-self-signed makes a certificate: leave out --tls-cert and --tls-key")
    if not is_installed("access"):
        raise StartError(missing_extra("--tls-self-signed", "access"))


def self_signed_values(data_dir: Path, listeners: Iterable[Listener]) -> dict[str, str]:
    """The values of `--tls-cert` and `--tls-key` for a self-signed certificate, which lies in the data folder.

    One that is there is used if it is valid for a while and names the host and the addresses of `listeners`; else a new
    one is made. Raises StartError.
    """
    names = _names(listeners)
    try:
        folder = private_folder(data_dir.absolute() / _FOLDER)
        cert, key = folder / _CERT, folder / _KEY
        if not (key.is_file() and _is_usable(cert, names)):
            _make(cert, key, names)
    except OSError as error:
        raise StartError(
            f"--tls-self-signed can't use the data folder {data_dir}: {error.strerror or error}"
        ) from error
    return {"tls_cert": str(cert), "tls_key": str(key)}


def _names(listeners: Iterable[Listener]) -> frozenset[str]:
    """The names and addresses at which clients find the server, as far as this machine knows them."""
    names = {"localhost", "127.0.0.1", "::1"}
    for name in (socket.gethostname(), *(listener.address for listener in listeners)):
        plain = name.strip("[]").lower()
        address = _address(plain)
        if plain.isascii() and 0 < len(plain) < 254 and not (address is not None and address.is_unspecified):
            names.add(plain)
    return frozenset(names)


def _is_usable(cert: Path, names: frozenset[str]) -> bool:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(cert.read_bytes())
        shown = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    listed = {*shown.get_values_for_type(x509.DNSName), *map(str, shown.get_values_for_type(x509.IPAddress))}
    left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return listed == names and left > datetime.timedelta(days=_RENEWED_DAYS)


def _make(cert: Path, key: Path, names: frozenset[str]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    secret = ec.generate_private_key(ec.SECP256R1())
    public = secret.public_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Weir, self-signed")])
    listed: list[x509.GeneralName] = [
        x509.IPAddress(address) if (address := _address(name)) is not None else x509.DNSName(name)
        for name in sorted(names)
    ]
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(public)
    made = made.serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(hours=1))
    made = made.not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    made = made.add_extension(x509.SubjectAlternativeName(listed), critical=False)
    # It signs nothing else: who trusts it trusts this server alone.
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    signed = made.sign(secret, hashes.SHA256())
    pem, hidden = serialization.Encoding.PEM, serialization.NoEncryption()
    write_private(key, secret.private_bytes(pem, serialization.PrivateFormat.PKCS8, hidden).decode())
    write_private(cert, signed.public_bytes(pem).decode())


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""
