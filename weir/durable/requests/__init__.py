"""One durable request: its headers, terms, deadline and retry policy."""
