"""Repository agents: what runs on a model's folder before the model is loaded, and after it was unloaded."""
