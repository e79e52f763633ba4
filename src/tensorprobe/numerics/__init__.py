"""Pure functions on tensors: statistics, peak and digest of one tensor, figures of a pair.

`summary` works on raw bytes and imports neither torch nor, if the native kernel is built, numpy. `pairs` measures many pairs
in one call from their addresses and returns numpy arrays. `device_summary` is the only module of this room that imports
torch; no other module here imports it.
"""
