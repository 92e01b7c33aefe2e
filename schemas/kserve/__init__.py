"""The KServe v2 protocol: JSON, binary and msgpack bodies, generate requests."""
