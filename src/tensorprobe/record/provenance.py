"""What a program was when it was recorded: its command, its code, and the switches that change numbers.

Out: a flat dictionary for the manifest. Environment variables are taken by name from a list, and arguments that look like
secrets are replaced. Nothing here fails: what cannot be found out is left out.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorprobe.model.interrupts import ignoring, let_through
from tensorprobe.record.apart import unseen_children

_ENVIRONMENT = re.compile(
    r"(OMP|MKL|OPENBLAS|KMP|CUDA|CUBLAS|CUDNN|NCCL|GLOO|HCCL|ASCEND|NPU|TORCH|PYTORCH|TORCHINDUCTOR|XLA|NVIDIA_TF32)_[A-Z0-9_]+"
    r"|PYTHONHASHSEED|WORLD_SIZE|LOCAL_WORLD_SIZE|DNNL_[A-Z0-9_]+|ONEDNN_[A-Z0-9_]+"
)
_SECRET_NAME = re.compile(r"(?i)token|secret|passw|credential|api[-_]?key|auth|private[-_]?key")
_SECRET_VALUE = re.compile(
    r"(hf_|sk-|ghp_|gho_|glpat-|xox[bp]-|AKIA)[A-Za-z0-9_\-]{8,}|eyJ[A-Za-z0-9_\-]{10,}\.|[A-Fa-f0-9]{32,}|://[^/\s:]+:[^@\s]+@"
)
_REDACTED = "(redacted)"
_PACKAGES = (
    "numpy",
    "transformers",
    "accelerate",
    "deepspeed",
    "megatron-core",
    "lightning",
    "torch_npu",
    "triton",
    "flash-attn",
    "peft",
)
_GIT_SECONDS = 2


def provenance() -> dict[str, Any]:
    """Return what is known of this process."""
    import torch  # here, because a comparison, which reads provenance only, runs without torch

    return {
        "argv": redacted([*getattr(sys, "orig_argv", sys.argv)]),
        "cwd": _folder(),
        **_commit(),
        "platform": platform.platform(),
        "packages": _packages(),
        "environment": _environment(os.environ),
        "switches": _switches(),
        "seed": torch.initial_seed(),
    }


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError as error:  # it was deleted
        let_through(error)
        return ""


def redacted(arguments: list[str]) -> list[str]:
    """Return arguments without those that look like a secret, by the name before them or by their form."""
    found: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            found.append(_REDACTED)
        elif equals and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value)):
            found.append(f"{name}={_REDACTED}")
        else:
            found.append(_REDACTED if _SECRET_VALUE.search(argument) else argument)
        hide_next = argument.startswith("-") and not equals and bool(_SECRET_NAME.search(argument))
    return found


def differences(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """Return what differs between two runs, as `name: baseline / candidate`. What only one of them knows is not listed."""
    found = []
    for key in sorted(baseline.keys() & candidate.keys()):
        ours, theirs = baseline[key], candidate[key]
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for name in sorted(ours.keys() | theirs.keys()):
                if ours.get(name) != theirs.get(name):
                    found.append(f"{name}: {_text(ours.get(name))} / {_text(theirs.get(name))}")
        elif ours != theirs:
            found.append(f"{key}: {_text(ours)} / {_text(theirs)}")
    return found


def _text(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else "not set" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: _REDACTED if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value) else value
        for name, value in sorted(environment.items())
        if _ENVIRONMENT.fullmatch(name) and not name.endswith("_CACHE_DIR")  # torch sets them itself, where it compiles
    }


def _packages() -> dict[str, str]:
    from importlib import metadata  # not needed to read a run

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> dict[str, Any]:
    """Return the commit of the folder the program runs in, and whether files differ from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        return (
            {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))} if commit else {}
        )
    except (OSError, subprocess.SubprocessError) as error:
        let_through(error)
        return {}


def _git(*arguments: str) -> str:
    with unseen_children():
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    return done.stdout.strip() if done.returncode == 0 else ""


def _autocast() -> str:
    """Return the kinds of device for which autocast is on as the recording begins."""
    from tensorprobe import torch_names

    on = []
    for device in ("cpu", "cuda", "npu", "xpu", "mps"):
        with ignoring(RuntimeError):  # a device that this torch does not know
            if torch_names.is_autocast_on(device):
                on.append(device)
    return ", ".join(on) or "off"


def _switches() -> dict[str, Any]:
    import torch

    backends = torch.backends
    asked = {
        "threads": torch.get_num_threads,
        "interop threads": torch.get_num_interop_threads,
        "default dtype": lambda: str(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "float32 matmul precision": torch.get_float32_matmul_precision,
        "autocast": _autocast,
        "TF32 in matmul": lambda: backends.cuda.matmul.allow_tf32,
        "TF32 in cudnn": lambda: backends.cudnn.allow_tf32,
        "reduced precision reductions, fp16": lambda: backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "reduced precision reductions, bf16": lambda: backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cudnn": lambda: backends.cudnn.enabled,
        "cudnn benchmark": lambda: backends.cudnn.benchmark,
        "cudnn deterministic": lambda: backends.cudnn.deterministic,
        "mkldnn": lambda: backends.mkldnn.enabled,
        "flush denormal": lambda: sys.float_info.min / 2 == 0.0,
    }
    found: dict[str, Any] = {}
    for name, ask in asked.items():
        with ignoring(
            AttributeError, RuntimeError
        ):  # no such switch in this torch, or it refuses to mix two ways to set it
            found[name] = ask()
    return found
