"""What frontends need of batch jobs: submit, list, look up, cancel, fetch results."""
