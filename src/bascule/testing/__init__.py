"""Support for tests: fakes, and drivers of real peers."""
