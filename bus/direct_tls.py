"""Certificates of connections between processes: those by which the broker knows us, asked for on both ends.

Names in certificates say nothing here, for addresses of processes come and go: an owner tells the fingerprint of its
certificate together with its address, by the broker, and a reader takes no other. Files are read for each connection, so a
certificate that was renewed holds from the next one on.
"""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

from bus.broker_access import BrokerAccess, BrokerRefused
from bus.connection import Bus


def is_encrypted(bus: Bus) -> bool:
    """Whether our connection to the broker is, and those between processes must be then."""
    server = bus.servers.current or bus.servers.first
    return bus.access.wants_tls(server, bus.server_info)


def listening_context(access: BrokerAccess) -> ssl.SSLContext:
    """For the end that listens. Raises BrokerRefused for files that can't be used, or without a certificate."""
    if not access.cert:
        raise BrokerRefused(
            "--payload-listen: connections to NATS are encrypted, so those between processes must be; that takes a "
            "certificate of our own, --nats-cert and --nats-key"
        )
    access.tls_context()  # says in our words what is wrong with the files
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=access.ca or None)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(access.cert, access.key, password=lambda: "")
    return context


def connecting_context(access: BrokerAccess) -> ssl.SSLContext:
    """For the end that connects. Raises BrokerRefused."""
    context = access.tls_context()
    context.check_hostname = False  # see the module
    return context


def renew(context: ssl.SSLContext, access: BrokerAccess) -> None:
    """Takes the certificate as the files are now. Raises OSError."""
    context.load_cert_chain(access.cert, access.key, password=lambda: "")


def own_fingerprint(access: BrokerAccess) -> bytes:
    """Of our certificate, the first in its file. Raises OSError or ValueError."""
    text = Path(access.cert).read_text()
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first = begin + text.split(begin, 1)[1].split(end, 1)[0] + end if begin in text else text
    return fingerprint(ssl.PEM_cert_to_DER_cert(first))


def fingerprint(certificate: bytes) -> bytes:
    """Of a certificate in DER."""
    return hashlib.sha256(certificate).digest()
