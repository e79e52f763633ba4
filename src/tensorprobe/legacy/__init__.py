"""The older tools' layouts, tables and ways. Nothing in the core imports it."""
