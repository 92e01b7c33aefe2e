"""How roles talk: subjects, streams, payload references, the registry of workers, the embedded broker (floor 1)."""
