"""The limits of a process, those of its container among them: found, printed, and raised where that is possible."""
