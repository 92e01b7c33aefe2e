"""What a policy lets a principal do: the actions, the document, and the one decision about each request."""
