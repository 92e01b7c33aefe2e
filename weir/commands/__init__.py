"""The commands of `weir`."""
