"""How requests are sent: over HTTP, gRPC and NATS; and what the server reports about a model."""
