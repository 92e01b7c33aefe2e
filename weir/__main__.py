"""`python -m weir` is the `weir` command: that is how the supervisor starts roles, whatever the path holds."""

from weir.cli import main

main()
