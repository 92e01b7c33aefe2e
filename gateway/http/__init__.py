"""The HTTP front door: KServe v2 with Triton's extensions."""
