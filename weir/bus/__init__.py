"""How roles communicate: the NATS connection and JetStream, names of subjects and streams, buckets, streams, payloads.

Rooms, each importing only those before it: `naming`, `links`, `nats`, `streams` and `payloads`, `kv`.
"""
