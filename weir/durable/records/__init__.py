"""The terminal record of each durable request: how it is written, stored and published."""
