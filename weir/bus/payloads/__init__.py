"""Large payloads: shared-memory arenas of a host, and fetching payloads from other hosts."""
