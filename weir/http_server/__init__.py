"""HTTP/1.1 connections of a server, and what bounds the connections of clients over any protocol."""
