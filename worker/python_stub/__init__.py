"""The program that runs one instance of a Python model, started by file in a process of its own.

A user's model may bring modules of any name, so that process imports nothing from here as part of a package: `stub.py`
is its main program, and the modules it needs lie beside it under names that begin with `_weir_`.
"""
