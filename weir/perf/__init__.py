"""The load tester behind `weir perf`: sends requests to one model of a running server, and measures."""
