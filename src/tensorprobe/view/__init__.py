"""The page from a small server on this machine: full tensors, and tables that are too large for a file."""
