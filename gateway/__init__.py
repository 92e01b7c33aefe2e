"""The gateway: HTTP, gRPC and NATS frontends, administration and metrics, and what they share."""
