"""Processes of this machine and a Ray cluster. They know nothing of what they compute."""
