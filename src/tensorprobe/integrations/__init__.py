"""Thin adapters over the front door for trainers and pytest. Each module needs its own library, and only when it is imported."""
