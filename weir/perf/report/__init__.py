"""The result of a load test as one JSON object, as a table, and as a plot."""
