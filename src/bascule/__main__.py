"""The command ``bascule``, and ``python -m bascule``: says what to install where the command line is not installed."""

import sys

from bascule import __version__
from bascule.core.extras import MissingExtra, require


def main() -> None:
    """Run a command.

    Without the extra ``cli``, ``--version`` alone works; anything else writes one line to standard error and exits with the code of
    MissingExtra.
    """
    try:
        require("cli", "or, to run a broker on this machine: pip install 'bascule[all]'")
    except MissingExtra as error:
        if sys.argv[1:] == ["--version"]:
            sys.stdout.write(f"bascule {__version__}\n")
            return
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    from bascule.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
