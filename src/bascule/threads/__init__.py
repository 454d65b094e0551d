"""Threads: all threads of the product are started here, so that an error that ends a thread is always handled."""
