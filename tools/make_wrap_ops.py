"""Writes support_wrap_ops.yaml, the list of recorded APIs as users of msprobe edit it.

python tools/make_wrap_ops.py            write the file
"""

from __future__ import annotations

from pathlib import Path

from tensorprobe.legacy.wrapped import NAMES

OWN_FILE = Path(__file__).parents[1] / "compat" / "msprobe" / "pytorch" / "hook_module" / "support_wrap_ops.yaml"
HEAD = """\
# The APIs that a dump holds, written by tools/make_wrap_ops.py.
# Put a # before a line to leave its API out. Add a line to have an API dumped that is not here.
# Ops of torch_npu and ATen ops are dumped whether they are listed or not: only a # leaves them out.
# A copy of this file can be named in config.json: "support_wrap_ops": "my_ops.yaml".
"""


def render() -> str:
    """Return the text of the file."""
    groups = [[f"{group}:", *(f"  - {name}" for name in sorted(names))] for group, names in NAMES.items()]
    return "\n".join([HEAD, *("\n".join(lines) + "\n" for lines in groups)])


if __name__ == "__main__":
    OWN_FILE.write_text(render())
