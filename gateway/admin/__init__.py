"""Administration, the same for all frontends: metadata, repository, settings, shared memory and statistics."""
