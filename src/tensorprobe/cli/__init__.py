"""The commands, one file for each. Nothing here is imported by any other room."""
