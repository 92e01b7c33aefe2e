"""The requests of a load test: generated from the configuration of a model, or read from a file."""
