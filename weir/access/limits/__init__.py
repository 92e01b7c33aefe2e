"""How much an owner may take: token buckets of the whole cluster, leased by gateways in small slices."""
