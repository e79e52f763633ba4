"""What the older tools of the family have in common when they compare: a table with a row for every line of two dumps.

`ptdbg_ascend` and `msprobe` each give a `TableStyle` (columns, words, rule); reading, pairing, naming files and saying what was
not compared is done here, once for both.
"""
