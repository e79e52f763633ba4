"""Rebuilds one recorded call, runs it on a device and on a reference, gathers evidence, writes a script that runs it alone."""
