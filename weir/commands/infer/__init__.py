"""`weir infer`: sends one request to a model of a running server, and prints the response."""
