"""Which functions one request passes: see `benchmarks.hops.__main__`."""
