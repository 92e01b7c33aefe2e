"""What the measurements of durable requests share."""
