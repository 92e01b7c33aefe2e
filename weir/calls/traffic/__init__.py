"""Which version of a model runs a request that names none, and how each version does."""
