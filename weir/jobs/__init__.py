"""Offline batch jobs: files in, files out, run through the batch lane."""
