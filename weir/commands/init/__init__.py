"""`weir init`: makes the folder of a model from its file, or from a template."""
