"""Tensors, datatypes, requests, errors."""
