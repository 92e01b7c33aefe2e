"""JetStream key-value buckets: the registry, settings, known and desired models, leases, presence."""
