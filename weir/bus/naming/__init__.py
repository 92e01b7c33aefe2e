"""Names on the bus: subjects, streams, buckets, headers, identities, and which user may use which."""
