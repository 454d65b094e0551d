"""Definitions shared by all packages: destinations, the base class of errors, the signals that end a program."""
