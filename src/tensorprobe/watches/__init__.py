"""Two sinks that look at a program while it runs: online compare, and the search for inf and nan."""
