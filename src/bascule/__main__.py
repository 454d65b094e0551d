"""The command ``bascule``, and ``python -m bascule``: says what to install where the command line is not installed."""

import sys

from bascule.core.extras import MissingExtra, require


def main() -> None:
    """Run a command; without the extra ``cli``, write one line to standard error and exit with the code of MissingExtra."""
    try:
        require("cli", "or, to run a broker on this machine: pip install 'bascule[all]'")
    except MissingExtra as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    from bascule.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
