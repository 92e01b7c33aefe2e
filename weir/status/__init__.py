"""`weir status`: collects the state of a cluster, derives its problems and displays both."""
