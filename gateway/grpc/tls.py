"""TLS for the gRPC door: HTTP/2 by ALPN, certificates from files, clients' certificates where they are asked for."""

from __future__ import annotations

import ssl
from pathlib import Path


def tls_context(server_cert: str, server_key: str, root_cert: str | None) -> ssl.SSLContext:
    """The server's side of TLS with these PEM files; with `root_cert`, clients must show a certificate it has signed.

    Raises OSError, with the option to be looked at, for a file that can't be read or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    _check_readable("--grpc-server-cert", server_cert)
    _check_readable("--grpc-server-key", server_key)
    try:
        context.load_cert_chain(server_cert, server_key)
    except ssl.SSLError as error:
        raise OSError(
            f"gRPC can't use the certificate of --grpc-server-cert with the key of --grpc-server-key: {_reason(error)}"
        ) from error
    if root_cert is not None:
        _check_readable("--grpc-root-cert", root_cert)
        try:
            context.load_verify_locations(root_cert)
        except ssl.SSLError as error:
            raise OSError(f"gRPC can't use the certificates of --grpc-root-cert: {_reason(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(option: str, path: str) -> None:
    if not path:
        raise OSError(f"gRPC with TLS needs {option}")
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise OSError(f"gRPC can't read the file of {option}, {path}: {error.strerror}") from error


def _reason(error: ssl.SSLError) -> str:
    return error.reason or "it is not in the PEM format"
