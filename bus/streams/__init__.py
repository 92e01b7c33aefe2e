"""JetStream streams and consumers: declarations, pulls, acknowledged publishes, stored messages and objects."""
