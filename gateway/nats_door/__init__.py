"""The door for NATS clients: requests on `infer.<model>`, answered on their reply subjects."""
