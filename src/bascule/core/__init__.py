"""What every part shares: destinations and the root of the errors."""
