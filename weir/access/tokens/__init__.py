"""Tokens of an issuer elsewhere (JWT): the keys with which it signs, and what a token says about its bearer."""
