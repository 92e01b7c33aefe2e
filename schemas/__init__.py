"""What is said between clients, roles and models: floor 0, imported by every other floor and importing none."""
