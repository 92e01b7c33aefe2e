"""Takes durable requests from their streams and runs them within limits, fairly among tenants."""
