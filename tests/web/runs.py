"""Runs that pages are made of: clean, one fault, eight ranks, unmatched calls, non-finite values, hostile names, many rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.builders.runs import Call, call, write, write_run
from tests.report.made import HOSTILE

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'
OPS = (
    "Functional.linear",
    "Tensor.matmul",
    "Functional.softmax",
    "Tensor.add",
    "Functional.layer_norm",
    "Functional.gelu",
)


def values(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def chain(blocks: int, *, fault: int | None = None, seed: int = 0) -> list[Call]:
    """Calls that feed each other, forward and backward; from the fault on, results are wrong: its last columns first."""
    calls: list[Call] = []
    held, wrong = values(4, 16, 32, seed=seed), 0.0
    numbers: dict[str, int] = {}
    for at in range(blocks * len(OPS)):
        op = OPS[at % len(OPS)]
        number = numbers[op] = numbers.get(op, -1) + 1
        made = values(4, 16, 32, seed=seed * 1000 + at + 1)
        if at == fault:
            made[..., -4:], wrong = 0, 0.05
        elif wrong:
            made = (made + wrong * values(4, 16, 32, seed=at + 77)).astype(np.float32)
        module = f"layers.{at // len(OPS)}.{op.rpartition('.')[2]}"
        calls.append(
            call(
                f"{op}.{number}.forward",
                inputs=[held],
                outputs=[made],
                module=module,
                stack=0,
                args=[{"slot": "input.0"}],
                kwargs={"dim": -1},
            )
        )
        held = made
    for at, forward in enumerate(reversed(list(calls))):
        gradient = values(4, 16, 32, seed=seed * 1000 + 500 + at)
        if wrong:
            gradient = (gradient + wrong * values(4, 16, 32, seed=at + 177)).astype(np.float32)
        calls.append(
            call(
                forward["name"].replace("forward", "backward"),
                inputs=[held],
                outputs=[gradient],
                module=forward["module"],
            )
        )
        held = gradient
    return calls


STACKS = [
    {
        "id": 0,
        "frames": [
            [__file__, 1, "chain", Path(__file__).read_text(encoding="utf-8").splitlines()[0]],
            ["train.py", 7, "<module>", "model(x)"],
        ],
    }
]


def pair(folder: Path, ours: Any, theirs: Any, **more: Any) -> tuple[Path, Path]:
    return write(folder / "baseline", ours, stacks=STACKS, **more), write(
        folder / "candidate", theirs, stacks=STACKS, **more
    )


def clean(folder: Path) -> tuple[Path, Path]:
    return pair(folder, chain(3), chain(3))


def fault(folder: Path) -> tuple[Path, Path]:
    """The softmax of the second block loses its last columns."""
    return pair(
        folder,
        {(step, 0): chain(4, seed=step) for step in range(2)},
        {(step, 0): chain(4, seed=step, fault=8) for step in range(2)},
    )


def eight_ranks(folder: Path) -> tuple[Path, Path]:
    places = [(step, rank) for step in range(3) for rank in range(8)]
    right = {(step, rank): chain(1, seed=rank + 10 * step) for step, rank in places}
    wrong = {
        (step, rank): chain(1, seed=rank + 10 * step, fault=2 if rank == 5 and step else None) for step, rank in places
    }
    return pair(folder, right, wrong)


def unmatched(folder: Path) -> tuple[Path, Path]:
    theirs = chain(3)
    theirs[4]["kwargs"] = {"dim": 1}
    del theirs[-1]
    theirs.insert(
        3, call("Torch.clamp.0.forward", inputs=[values(2)], outputs=[values(2, seed=3)], module="layers.0.extra")
    )
    return pair(folder, chain(3), theirs)


def regions(folder: Path) -> tuple[Path, Path]:
    """A call that only the baseline makes, and whose result both runs read."""
    theirs = chain(3)
    del theirs[7]
    return pair(folder, chain(3), theirs)


def nonfinite(folder: Path) -> tuple[Path, Path]:
    theirs = chain(2)
    broken = theirs[3]["slots"]["output.0"].copy()
    broken[1, 2, 3], broken[0, 0, 0] = np.nan, np.inf
    theirs[3]["slots"]["output.0"] = broken
    return pair(folder, chain(2), theirs)


def hostile(folder: Path) -> tuple[Path, Path]:
    """Names with markup, control characters and marks that reverse text, in every place that a run can fill."""

    def calls(wrong: float) -> list[Call]:
        quiet = "".join(sign for sign in HOSTILE if sign >= " ")  # the name of a call has no control characters
        name = f"Functional.{MARKUP}{quiet}.0.forward"
        made = values(8, 8, seed=2) + np.float32(wrong)
        return [
            call("Torch.add.0.forward", inputs=[values(8, 8)], outputs=[values(8, 8, seed=1)], module=MARKUP),
            call(
                name,
                inputs=[values(8, 8, seed=1)],
                outputs=[made],
                module=f"layers.{MARKUP}.{HOSTILE}",
                stack=0,
                args=[MARKUP],
                kwargs={MARKUP: HOSTILE},
            ),
        ]

    stacks = [{"id": 0, "frames": [[f"/tmp/{MARKUP}.py", 3, MARKUP, MARKUP]]}]
    both = [
        write(folder / f"{name}<b>&\u202e", calls(wrong), stacks=stacks)
        for name, wrong in (("baseline", 0.0), ("candidate", 1.0))
    ]
    return both[0], both[1]


def many(folder: Path, rows: int = 100_000) -> tuple[Path, Path]:
    """A comparison of so many rows, all of which differ, each by another amount."""
    inputs = 7
    count = -(-rows // (inputs + 1))
    source = np.random.default_rng(0)
    held = source.standard_normal((count * inputs + 1, 16)).astype(
        np.float32
    )  # 64 bytes each, as tensors.bin aligns them
    size = 10.0 ** source.uniform(-7, -1, (len(held), 1))
    found = []
    for name in ("baseline", "candidate"):
        if name == "candidate":
            held = (held * (1 + size * source.standard_normal(held.shape))).astype(np.float32)
        wide = held.astype(np.float64)
        facts = zip(wide.max(1), wide.min(1), wide.mean(1), np.linalg.norm(wide, axis=1), strict=True)
        slots = [
            f'"dtype":"float32","shape":[16],"offset":{64 * at},"nbytes":64,"digest":"{xxhash.xxh3_128_hexdigest(held[at].tobytes())}",'
            f'"summary":[{high!r},{low!r},{mean!r},{norm!r},0,0]}}'
            for at, (high, low, mean, norm) in enumerate(tuple(map(float, each)) for each in facts)
        ]
        lines = []
        for at in range(count):
            own = [f'{{"name":"input.{slot}",{slots[at * inputs + slot]}' for slot in range(inputs)]
            own.append(f'{{"name":"output.0",{slots[(at + 1) * inputs]}')
            op = OPS[at % 6]
            module = f"layers.{at // 60}.{op.rpartition('.')[2]}"
            lines.append(f'{{"name":"{op}.{at // 6}.forward","module":"{module}","slots":[{",".join(own)}]}}\n')
        write_run(folder / name, "".join(lines).encode(), held.tobytes())
        found.append(folder / name)
    return found[0], found[1]


def empty(folder: Path) -> tuple[Path, Path]:
    """Calls without tensors: there is nothing to measure."""
    calls = [call("Torch.manual_seed.0.forward"), call("Torch.no_grad.0.forward")]
    return pair(folder, calls, calls)
