"""Change bytes and JSON fields of small real dumps, run the commands on them, and check time, memory, exit code and output.

python tools/fuzz.py --minutes 1 [--seed N] [--only run|shards|ptdbg|checker|msprobe|precheck|settings|watch]
Exit code 1 when a promise was broken; what broke it is kept in fuzz-output/ with the command.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.attacks import costs
from tests.builders import checker, msprobe, ptdbg, ranks

KEPT = Path("fuzz-output")
BAD: list[Any] = [None, -1, 0, 2**31, 2**63, 2**64, 10**400, 1.5, 1e308, float("nan"), float("inf"), "", "\x00", "a" * 5000,
                  "../../etc/passwd", "\x1b[31m\u202e", "=1+1", True, [], {}, [[]], [2**30, 2**30], {"slot": "input.9"}]  # fmt: skip
X = np.arange(16, dtype=np.float32).reshape(4, 4)


POLICY = """name = "house rules"
base = "noise-aware"
[[rule]]
op = "*.dropout"
ignore = true
[[rule]]
call = "Functional.linear.*.forward"
diverges = [{ max_abs = 1e-2, one_minus_cosine = 1e-6 }, { nonfinite_different = 0 }]
"""
WATCHED = """
import sys, torch, tensorprobe
with tensorprobe.overflow(out=sys.argv[1]):
    torch.zeros(2).log().sum()
"""


def make_seeds(root: Path) -> dict[str, Path]:
    """One small dump for each reader, made by the commands and the builders of the tests."""
    baseline, candidate = ranks.write_pair(root, steps=(0, 1))
    demand(costs.run("compare", baseline, candidate, "-o", root / "shards", "--shard", "1/1", timeout_s=300))
    demand(costs.run("precheck", baseline, "-o", root / "precheck" / "out", timeout_s=300))
    lines = [ptdbg.tensor(f"Torch_relu_0_forward_{slot}", X) for slot in ("input.0", "output")]
    ptdbg.write_dump(root / "ptdbg_v1.0", [*lines, ptdbg.stack("Torch_relu_0_forward", ["a.py", "1", "f", "x"])])
    entry = {"args": [checker.tensor()], "kwargs": {}}
    checker.write_dump(root / "checker", {"Functional*relu*0": entry}, stack={"Functional*relu*0": ["File a, line 1"]})
    msprobe.write_conv_net(root / "msprobe")
    settings = root / "settings"
    settings.mkdir()
    (settings / "policy.toml").write_text(POLICY)
    (settings / "names.map").write_text("Functional.silu = NPU.npu_silu\nblocks.0 = layers.0\nblocks.1 = layers.1\n")
    watch = root / "watch"
    demand(costs.run_program([sys.executable, "-c", WATCHED, str(watch)], 300))
    names = ("shards", "precheck", "checker", "msprobe", "settings", "watch")
    return {"run": baseline, "ptdbg": root / "ptdbg_v1.0", **{name: root / name for name in names}}


def demand(cost: costs.Cost) -> None:
    if cost.problems(0, 1, 2):
        raise SystemExit(f"the seeds cannot be made: {cost}")


def commands_for(name: str, place: Path, seeds: dict[str, Path], scratch: Path) -> list[tuple[object, ...]]:
    if name == "shards":
        return [("merge", place)]
    if name == "settings":
        pair = ("compare", seeds["run"], seeds["run"])
        return [(*pair, "--policy", place / "policy.toml"), (*pair, "--map", place / "names.map")]
    if name == "watch":
        return [("overflow", place), ("overflow", place, "--format", f"html={scratch / 'page.html'}")]
    if name == "precheck":
        return [("precheck", seeds["run"], "--resume", place / "out")]
    return [
        ("inspect", place),
        ("inspect", place, "--verify"),
        ("overflow", place),
        ("precheck", place, "--time-limit", "5"),
        ("compare", seeds[name], place),
        ("compare", place, seeds[name], "-o", scratch / "out", "--format", "xlsx"),
        ("compare", seeds[name], place, "--format", f"html={scratch / 'page.html'}"),
        ("audit", place, "--time-limit", "5"),
        ("export", place, "--to", "npy", "-o", scratch / "files"),
        ("export", place, "--to", "safetensors", "-o", scratch / "files"),
    ]


def mutate(folder: Path, dice: random.Random) -> str:
    """Change one file of the folder; what was done to it."""
    path = dice.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    raw = bytearray(path.read_bytes())
    if path.suffix in (".json", ".jsonl") and dice.random() < 0.6:
        lines = raw.decode(errors="replace").splitlines() if path.suffix == ".jsonl" else [raw.decode(errors="replace")]
        at = dice.randrange(len(lines)) if lines else 0
        try:
            tree = json.loads(lines[at])
        except (ValueError, IndexError):
            tree = None
        if isinstance(tree, (dict, list)):
            where = change(tree, dice)
            lines[at] = json.dumps(tree)
            path.write_text("\n".join(lines) + "\n")
            return f"{path.relative_to(folder)}: {where}"
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(raw)) if raw else 0
        raw[at : at + dice.choice((0, 1, 4))] = dice.randbytes(dice.choice((0, 1, 4, 64)))
    if dice.random() < 0.2:
        del raw[dice.randrange(len(raw) + 1) :]
    path.write_bytes(raw)
    return f"{path.relative_to(folder)}: bytes"


def change(tree: Any, dice: random.Random) -> str:
    """Replace one value somewhere in the tree by a bad one; where."""
    where = ""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return f"{where} is empty"
        key = dice.choice(keys)
        where += f"[{key!r}]"
        if isinstance(tree[key], (dict, list)) and tree[key] and dice.random() < 0.8:
            tree = tree[key]
            continue
        tree[key] = dice.choice(BAD)
        return where[:200]


def main() -> int:
    """Fuzz for so many minutes; the exit code comes back."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=1.0)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--only", default="")
    given = options.parse_args()
    dice = random.Random(given.seed)
    tried: Counter[str] = Counter()
    broken = 0
    with tempfile.TemporaryDirectory() as made:
        seeds = make_seeds(Path(made))
        names = [name for name in seeds if name.startswith(given.only)]
        end = time.monotonic() + 60 * given.minutes
        while time.monotonic() < end:
            name = dice.choice(names)
            with tempfile.TemporaryDirectory() as scratch:
                place = Path(scratch) / seeds[name].name
                shutil.copytree(seeds[name], place)
                what = [mutate(place, dice) for _ in range(dice.randint(1, 2))]
                kept = Path(scratch) / "kept"
                shutil.copytree(place, kept)
                command = dice.choice(commands_for(name, place, seeds, Path(scratch)))
                cost = costs.run(*command)
                tried[f"{name} {command[0]}"] += 1
                if problems := cost.problems(0, 1, 2):
                    broken += 1
                    shutil.copytree(kept, KEPT / f"{given.seed}-{broken}", dirs_exist_ok=True)
                    last = " | ".join(cost.err.strip().splitlines()[-3:])
                    sys.stdout.write(
                        f"BROKEN {broken}: {command[0]} {command[1:]} {what}: {problems}\n  {last[-400:]}\n"
                    )
    for kind, count in sorted(tried.items()):
        sys.stdout.write(f"{kind:20} {count:5} tried\n")
    sys.stdout.write(f"{tried.total()} commands, {broken} broke a promise (seed {given.seed})\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
