"""GPU tests and benchmarks for machines without a package registry."""
