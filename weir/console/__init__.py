"""The console: a web page with the state, the load and the requests of a cluster, served by a process of its own."""

DEFAULT_PORT = 8080
"""The port without an option. It stands here because the table of options must not import the settings to name it."""
