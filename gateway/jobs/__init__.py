"""Offline jobs: files in, files out, each item once."""
