"""Attacks of many kinds at once beside honest clients, whose every answer is checked."""
