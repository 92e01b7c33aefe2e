"""Requests to models over the bus: of a gateway for its clients, and of a worker for ensembles and Python models."""
