"""The `weir` command, as a script and as `python -m weir`, by which the supervisor starts roles."""

from __future__ import annotations

from weir.own_packages import prefer_own_packages


def main() -> None:
    """Run the command line, with our own packages whatever PYTHONPATH holds."""
    prefer_own_packages()
    from weir.cli import main as run

    run()


if __name__ == "__main__":
    main()
