"""Folders that belong to one process (`locked`) or to one user (`private`), on machines with others."""
