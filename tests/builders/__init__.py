"""Runs and dumps made by hand, with nothing of the code under test: ours, and those of the three older tools."""
