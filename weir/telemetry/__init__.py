"""What can be seen of a running role: logs, readiness (floor 1)."""
