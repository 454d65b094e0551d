"""The broker engine: pure state and decisions."""
