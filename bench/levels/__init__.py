"""Healthy pairs at every level, pairs in two precisions, and faults at level module."""
