"""`weir batch`: offline jobs, which run a model over files."""
