"""`weir status`: what the cluster looks like at one moment, and what of it needs a human."""
