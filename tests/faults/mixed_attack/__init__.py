"""Attacks of many kinds beside honest clients that check every response."""
