"""Runs batch jobs: reads items, keeps a window of requests in flight, writes shards of results."""
