"""Responses on their way back to a caller: dispatch, ordering, outputs from other hosts."""
