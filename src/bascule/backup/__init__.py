"""Backup and restore of an installation: the topics of its journal, as of one point."""
