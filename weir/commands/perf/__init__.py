"""`weir perf`: the command of the load tester `weir.perf`."""
