"""Links: Unix sockets between processes of one host, which carry messages instead of nats-server."""
