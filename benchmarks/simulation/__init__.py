"""The simulator behind `benchmarks.simulate`: a workload, workers and a clock that exist only as numbers.

`scenario` says what is simulated, `workload` what comes, `cluster` plays it against the real policies, `outcome` tells
what became of it, and `plot` draws it.
"""
