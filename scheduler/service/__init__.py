"""The asynchronous shell around the policies: messages in, batches out."""
