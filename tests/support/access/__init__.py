"""Gates and doors for tests."""
