"""Puts two runs side by side: which call belongs to which, and how much their tensors differ. Has no opinion.

Calling `tensorprobe.compare(...)` compares two runs; the function itself is in the room `engine`, which also judges.
"""

from tensorprobe.rooms import make_callable

make_callable(__name__)
