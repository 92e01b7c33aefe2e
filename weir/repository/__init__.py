"""Triton model repositories: the folders of models, and the configurations in them."""
