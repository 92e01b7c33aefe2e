"""The bounds of what a model asks of its worker."""

MAX_UNREAD_BYTES = 256 * 1024 * 1024
"""Responses of one call that wait for the model to read them; a call that gets further ahead is given up."""

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Responses of one call that are kept for another iteration; where they are more, there is none."""

MAX_FILES_BYTES = 128 * 1024 * 1024
"""Files that one load may bring."""
