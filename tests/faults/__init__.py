"""The fault suite: `python -m tests.faults` checks that faults lose, duplicate or corrupt no request."""
