"""Weir beside Triton on the same models, in one run: `make bench`, or `python -m benchmarks.compare --help`."""
