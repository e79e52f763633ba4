"""Pure functions on the numbers of tensors: statistics and digest of one, figures of two measured against each other.

`summary` and `digest` work on raw bytes and import neither torch nor, where the native kernel is built, numpy. `pairs` measures many
pairs in one call, from their addresses, and gives numpy arrays. `device_summary` is the one module of this room that needs
torch; nothing else here imports it.
"""
