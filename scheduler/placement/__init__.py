"""Which instance of which worker a batch goes to."""
