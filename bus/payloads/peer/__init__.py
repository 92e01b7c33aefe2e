"""Direct TCP connections between processes of different hosts, which carry large payloads.

A separate transport from NATS, with authentication and TLS of its own, for payloads only. It is to be replaced by one
transport for payloads and dispatch.
"""
