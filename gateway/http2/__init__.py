"""HTTP/2 for servers (RFC 9113): only what gRPC asks of it, at a fifth of the cost of a general server.

`frames` and `headers` read and write the wire, `connection` and `stream` decide without doing any I/O, `protocol` ties
a connection to a transport and a clock. What is asked and answered on a stream is the application's business.
"""
