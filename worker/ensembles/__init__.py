"""Models made of other models: what runs after what, and the coordinator that asks the steps through the bus."""
