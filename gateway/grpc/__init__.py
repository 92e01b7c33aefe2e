"""The gRPC frontend: `inference.GRPCInferenceService` as Triton's clients expect it, on `weir.gateway.http2`."""
