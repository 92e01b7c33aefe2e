"""Backends: what loads a model of one kind and executes batches on it."""
