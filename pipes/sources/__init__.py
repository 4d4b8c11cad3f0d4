"""Where elements begin and end: files and stores, listers, openers and savers; the only outside I/O."""
