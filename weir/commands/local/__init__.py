"""The servers of this machine: where they keep their data, and how commands find them."""
