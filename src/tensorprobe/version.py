"""The version of the package, in a file of its own so that a build reads it without importing anything."""

VERSION = "0.1.0"
