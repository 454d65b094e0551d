"""``python -m bascule.cli``, with which ``bascule up`` starts its parts."""

from bascule.cli.main import main

main()
