"""The gRPC front door: `inference.GRPCInferenceService`, as Triton's clients speak it, on `gateway.http2`."""
