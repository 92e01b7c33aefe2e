"""What frontends need of durable requests: submit, look up, cancel, call back."""
