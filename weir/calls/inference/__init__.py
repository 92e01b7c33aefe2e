"""How frontends run requests: the call of one request, and the forms of its bodies."""
