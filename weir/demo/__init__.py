"""`weir demo`: a model repository of real networks, served and asked through Triton's stock clients."""
