"""What every part shares: destinations, the root of the errors, the signals that end a program."""
