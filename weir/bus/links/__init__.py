"""Links: connections between processes that carry messages instead of nats-server, by Unix sockets or TCP."""
