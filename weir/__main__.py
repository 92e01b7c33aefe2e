"""The entry point of the `weir` script and of `python -m weir`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from weir.commands.app import main as run

    run()


if __name__ == "__main__":
    main()
