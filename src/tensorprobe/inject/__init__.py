"""Runs our code inside unmodified Python programs, right after they import torch.

`environment` gives the variables to start such a program with: a folder with a `sitecustomize` comes first on its path,
and each hook is a function `module:name` with a text to be handed to it. Hooks already in the environment are kept, so that
one of our commands may run another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

HOOKS_VARIABLE = "TENSORPROBE_HOOKS"
SIM_HOOK = "tensorprobe.inject.sim:begin"
"""Brings the simulated device; the name is known here because `on_import` must not import that module."""
_SITE = Path(__file__).parent / "site"
_SOURCE = Path(__file__).parents[2]


def environment(hooks: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment `base` with hooks that every Python process runs after its first import of torch."""
    merged = {**json.loads(base.get(HOOKS_VARIABLE) or "{}"), **hooks}
    old_paths = [
        path for path in base.get("PYTHONPATH", "").split(":") if path and path not in (str(_SITE), str(_SOURCE))
    ]
    return {
        **base,
        HOOKS_VARIABLE: json.dumps(merged),
        "PYTHONPATH": ":".join([str(_SITE), *old_paths, str(_SOURCE)]),
    }
