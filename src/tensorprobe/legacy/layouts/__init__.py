"""Readers and writers of the older tools' dumps. Each reader returns the same `Run`."""
