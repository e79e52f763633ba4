"""Processes of this machine and a Ray cluster. Knows nothing of what they compute."""
