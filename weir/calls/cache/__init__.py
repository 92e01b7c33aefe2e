"""The response cache: keys, the local store, the store shared over JetStream, counters."""
