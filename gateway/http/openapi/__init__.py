"""The HTTP API as an OpenAPI document: of the routes, and of each model's own inputs and outputs."""
