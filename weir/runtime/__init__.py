"""What every process of Weir needs, whatever its role: containment of failures, rate-limited logs, memory accounting."""
