"""The counters of all processes, collected on demand and summed."""
