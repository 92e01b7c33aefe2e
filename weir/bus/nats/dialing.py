"""Opens connections to nats-server: INFO, TLS, CONNECT. Source: the NATS client protocol."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from weir.bus.nats.access import BrokerAccess, BrokerServer, refused_by_tls, tls_name
from weir.bus.nats.protocol import NatsProtocol, connect_options


async def dial(
    server: BrokerServer,
    first: BrokerServer,
    access: BrokerAccess,
    name: str,
    make_protocol: Callable[[], NatsProtocol],
) -> NatsProtocol:
    """A connection that the server has accepted. Raises OSError; BrokerRefused where a retry does not help.

    `first` is the server configured first, whose name must be in the certificates of servers that are known by address.
    """
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(make_protocol, server.host, server.port)
    try:
        await protocol.greeted
        if access.wants_tls(server, protocol.info):
            try:
                secured = await loop.start_tls(
                    transport, protocol, access.tls_context(), server_hostname=tls_name(server, first)
                )
            except ssl.SSLError as error:
                raise refused_by_tls(server.place, error) from error
            assert secured is not None  # noqa: S101 - a transport that is closing raises instead
            protocol.secure(secured)
        protocol.introduce(connect_options(name, access.identity(server, protocol.info)))
        try:
            await protocol.established
        except ssl.SSLError as error:
            raise refused_by_tls(server.place, error) from error
    except BaseException:
        protocol.abort()
        raise
    return protocol
