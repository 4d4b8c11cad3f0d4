"""Bytes to records and back: readers that state their position, and the stages built on them."""
