"""How a user names calls: by a name, the start of one, a glob, a module path, or `module:` and a path.

`Functional.conv2d.1` is its forward and its backward, `Functional.conv2d` every call of the op, `*.linear.*` a glob. If no call
has such a name, it is taken for the path of a module: `blocks.0.attention` is every call made in it. `module:blocks.*.attention`
is always a path.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from tensorprobe.ops.names import parse_call_name

MODULE = "module:"


def name_fits(name: str, wanted: str) -> bool:
    """Return whether this text names the call: its name, the start of it up to a dot, or a glob."""
    return name == wanted or name.startswith(wanted + ".") or fnmatchcase(name, wanted)


def is_op(name: str, wanted: str) -> bool:
    """Return whether a call is one of an op, `linear` or `Functional.linear`, also as a glob."""
    op = parse_call_name(name).op
    return fnmatchcase(op, wanted) or fnmatchcase(op.partition(".")[2], wanted)


def is_inside(module: str, wanted: str) -> bool:
    """Return whether a module is the one that is wanted, or lies inside it."""
    return bool(module) and (
        module == wanted
        or module.startswith(wanted + ".")
        or fnmatchcase(module, wanted)
        or fnmatchcase(module, f"{wanted}.*")
    )
