"""Links between hosts (`weir.bus.links.tcp`) of a process with a bus: encrypted if its connection to the broker is.

Both ends then present the certificates that they use for the broker. Files are read for each link, so a renewed
certificate takes effect with the next one.
"""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path

from weir.bus.links.tcp import TcpListener, fingerprint
from weir.bus.nats.access import BrokerAccess, BrokerRefused
from weir.bus.nats.connection import Bus
from weir.schemas.core.names import ListenAddress
from weir.schemas.wire.transfers import OwnerAddress


async def listen_for_links(bus: Bus, where: str | None) -> TcpListener | None:
    """Listens on the address of `--payload-listen`, on none if `where` is None.

    Raises OSError, ValueError for a malformed address, and BrokerRefused if links must be encrypted and can't be.
    """
    if where is None:
        return None
    listener = make_listener(ListenAddress.of(where), bus.access, _is_encrypted(bus))
    await listener.start()
    return listener


def make_listener(where: ListenAddress, access: BrokerAccess, is_encrypted: bool) -> TcpListener:
    """Returns a listener that has not started, with the certificate of `access` if links are encrypted.

    Raises BrokerRefused if there is none, or if its files can't be used.
    """
    if not is_encrypted:
        return TcpListener(where)
    context = _listening_context(access)
    return TcpListener(where, context, partial(_renew, context, access))


def context_for(bus: Bus, address: OwnerAddress) -> ssl.SSLContext | None:
    """Returns how a link to this address is encrypted, None if not. Raises OSError where the two ends differ."""
    if bool(address.certificate) != _is_encrypted(bus):
        raise OSError("one end encrypts its connections, and the other does not")
    if not address.certificate:
        return None
    context = bus.access.tls_context()
    context.check_hostname = False  # the fingerprint is checked instead
    return context


def _is_encrypted(bus: Bus) -> bool:
    server = bus.servers.current or bus.servers.first
    return bus.access.wants_tls(server, bus.server_info)


def _listening_context(access: BrokerAccess) -> ssl.SSLContext:
    if not access.cert:
        raise BrokerRefused(
            "--payload-listen: connections to NATS are encrypted, so those between processes must be; that takes a "
            "certificate of our own, --nats-cert and --nats-key"
        )
    access.tls_context()  # raises a readable error for malformed files
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=access.ca or None)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(access.cert, access.key, password=lambda: "")
    return context


def _renew(context: ssl.SSLContext, access: BrokerAccess) -> bytes:
    """Loads the certificate from its files again, and returns its fingerprint. Raises OSError or ValueError."""
    context.load_cert_chain(access.cert, access.key, password=lambda: "")
    text = Path(access.cert).read_text()
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first = begin + text.split(begin, 1)[1].split(end, 1)[0] + end if begin in text else text
    return fingerprint(ssl.PEM_cert_to_DER_cert(first))
