"""The Python backend: models of `triton_python_backend_utils`, each instance in a process of its own."""
