"""The journal's formats and rules."""
