"""Keys that Weir makes itself: what is stored of them, and how a request shows one."""
