"""``bascule config import``: readers of the configurations of other brokers, and the report of what was taken."""
