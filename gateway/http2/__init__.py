"""HTTP/2 for servers (RFC 9113): only what gRPC needs, at a fifth of the cost of a general server.

`frames` and `headers` read and write the wire format. `connection` and `stream` implement the protocol without I/O.
`protocol` connects a connection to a transport and a clock. An application handles the requests on streams.
"""
