"""How a model is asked, by whoever asks: a gateway for its clients, a worker for ensembles and Python models."""
