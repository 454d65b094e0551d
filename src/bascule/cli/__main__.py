"""``python -m bascule.cli``: how ``bascule up`` starts its parts."""

from bascule.cli.main import main

main()
