"""Requests that are answered later: accepted on disk over HTTP or gRPC, and asked for by their ids."""
