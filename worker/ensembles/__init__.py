"""Ensembles: loading and checking them, and the coordinator that calls the models of their steps through the bus."""
