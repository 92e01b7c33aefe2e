"""Model repositories in object stores: their addresses, credentials, listings and contents."""
