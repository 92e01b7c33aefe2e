"""The simulator behind `benchmarks.simulate`: workload, workers and clock are pure data.

`scenario` has the options, `workload` the arrivals, `cluster` runs them against the real policies, `outcome` has the
results, and `plot` draws them.
"""
