"""What feeds the gate of a process: the policy file, the keys, and the key sets of the issuers of tokens."""
