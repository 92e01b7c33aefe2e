"""The HTTP API of the console's page."""
