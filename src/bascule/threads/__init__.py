"""Threads: each one of the product is started here, so that none ends of an error without consequence."""
