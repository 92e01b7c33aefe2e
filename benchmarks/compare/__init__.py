"""Weir beside Triton on the same models: `make bench`, or `python -m benchmarks.compare --help`."""
