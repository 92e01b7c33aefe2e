"""Data that clients, roles and models exchange: layer 0, imported by every other layer and importing none."""
