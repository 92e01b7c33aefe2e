"""`weir audit`: who did what, from the broker."""
