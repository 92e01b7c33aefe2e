"""`weir doctor`: checks whether this machine has what Weir needs, and says what to do where it has not."""
