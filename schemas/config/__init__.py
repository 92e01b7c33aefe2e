"""Model configuration (`config.pbtxt`) and the normalization of requests against it."""
