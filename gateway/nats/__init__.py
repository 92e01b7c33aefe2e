"""The NATS frontend: requests on `infer.<model>`, answered on their reply subjects."""
