"""Pure functions on the numbers of a tensor: its statistics and its digest.

`summary` and `digest` work on raw bytes and import neither torch nor, where the native kernel is built, numpy.
`device_summary` is the one module of this room that needs torch; nothing else here imports it.
"""
