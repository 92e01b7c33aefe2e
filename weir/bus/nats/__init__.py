"""The NATS client: protocol, connections, TLS, requests and replies, JetStream, and the embedded nats-server."""
