"""One level of load, measured in windows; the sweep over all levels; whether the client itself was the limit."""
