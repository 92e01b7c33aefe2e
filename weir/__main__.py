"""The entry point of the `weir` script and of `python -m weir`."""

from __future__ import annotations

from weir.own_packages import prefer_own_packages


def main() -> None:
    """Run the command line, with Weir's own packages whatever PYTHONPATH contains."""
    prefer_own_packages()
    from weir.commands.app import main as run

    run()


if __name__ == "__main__":
    main()
