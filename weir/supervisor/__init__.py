"""The supervisor of `weir serve`: starts roles, restarts them, stops them in order."""
