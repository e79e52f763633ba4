"""Made-up runs with known truth: forwards of a transformer, recorded, numbered and ordered as a capture would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from tensorprobe.pairing.align import PLAIN, Alignment, Detail, Options, align_calls
from tensorprobe.record.run import Entry


class Made(NamedTuple):
    """A call to be recorded. `identity` says which call it is, whatever number it gets."""

    op: str
    module: str
    signature: Hashable
    identity: Hashable
    has_backward: bool = True


class Recorded(NamedTuple):
    entries: list[Entry]
    details: list[Detail]
    truth: list[tuple[Hashable, str, int]]
    """Identity, direction, repeat of each entry."""


class Plan(NamedTuple):
    layers: int = 3
    batch: int = 4
    modules: bool = True
    """Whether calls know their module; a program that uses no modules repeats the same calls."""
    module_calls: bool = False


SMALL = Plan()


def transformer(plan: Plan = SMALL) -> list[Made]:
    """The forwards of one step."""
    made: list[Made] = []

    def call(op: str, module: str, *shape: int, has_backward: bool = True) -> None:
        identity = len(made)
        made.append(Made(op, module if plan.modules else "", (plan.batch, *shape), identity, has_backward))

    def leave(module: str, class_name: str) -> None:
        if plan.module_calls:
            call(f"Module.{module}.{class_name}" if module else f"Module.{class_name}", module, 64)

    call("Torch.arange", "", 16, has_backward=False)
    call("Functional.embedding", "embed", 16, 64)
    leave("embed", "Embedding")
    for layer in range(plan.layers):
        block = f"blocks.{layer}"
        call("Functional.layer_norm", f"{block}.norm1", 64)
        leave(f"{block}.norm1", "LayerNorm")
        for part in ("query", "key", "value"):
            call("Functional.linear", f"{block}.attention.{part}", 64)
            leave(f"{block}.attention.{part}", "Linear")
            call("Tensor.view", f"{block}.attention", 4, 16)
            call("Tensor.transpose", f"{block}.attention", 16, 4)
        call("Tensor.matmul", f"{block}.attention", 16, 16)
        call("Tensor.div", f"{block}.attention", 16, 16)
        call("Functional.softmax", f"{block}.attention", 16, 16)
        call("Functional.dropout", f"{block}.attention", 16, 16)
        call("Tensor.matmul", f"{block}.attention", 16, 64)
        call("Functional.linear", f"{block}.attention.out", 64)
        leave(f"{block}.attention.out", "Linear")
        leave(f"{block}.attention", "Attention")
        call("Tensor.add", block, 64)
        call("Functional.layer_norm", f"{block}.norm2", 64)
        call("Functional.linear", f"{block}.mlp", 256)
        call("Functional.gelu", f"{block}.mlp", 256)
        call("Functional.linear", f"{block}.mlp", 64)
        leave(f"{block}.mlp", "MLP")
        call("Tensor.add", block, 64)
        leave(block, "Block")
    call("Functional.linear", "head", 1000)
    call("Functional.cross_entropy", "")
    leave("", "GPT")
    return made


def record(
    forwards: Iterable[Made],
    *,
    backward: bool = True,
    forward: bool = True,
    recomputed: Callable[[Made], bool] | None = None,
) -> Recorded:
    """What a capture writes for these forwards: numbers from 0 for each op, backwards in reverse, recomputation before them."""
    result = Recorded([], [], [])
    numbers: Counter[str] = Counter()
    numbered: list[tuple[Made, int]] = []
    for made in forwards:
        numbered.append((made, numbers[made.op]))
        numbers[made.op] += 1

    def write(made: Made, number: int, direction: str, repeat: int = 0) -> None:
        is_module = made.op.startswith("Module.")
        name = f"{made.op}.{direction}.{number}" if is_module else f"{made.op}.{number}.{direction}"
        level = "module" if is_module else "aten" if made.op.startswith("Aten.") else "api"
        result.entries.append(Entry(len(result.entries), name, repeat))
        result.details.append(Detail(level, made.module, (direction, made.signature)))
        result.truth.append((made.identity, direction, repeat))

    for made, number in numbered if forward else ():
        write(made, number, "forward")
    if backward:
        if recomputed is not None:
            for made, number in numbered:
                if recomputed(made):
                    write(made, number, "forward", 1)
        for made, number in reversed(numbered):
            if made.has_backward:
                write(made, number, "backward")
    return result


def align(baseline: Recorded, candidate: Recorded, options: Options = PLAIN) -> Alignment:
    """The alignment, checked for its invariants."""
    sides = {"baseline": baseline.details, "candidate": candidate.details}
    alignment = align_calls(baseline.entries, candidate.entries, sides.__getitem__, options)
    alignment.self_check(len(baseline.entries), len(candidate.entries))
    assert alignment.pairs == sorted(alignment.pairs)
    return alignment


def by_names(
    baseline: Sequence[str],
    candidate: Sequence[str],
    options: Options = PLAIN,
    modules: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Alignment:
    """The alignment of calls given by name alone, or with the modules of both sides."""
    names = baseline, candidate
    paths = modules or tuple([""] * len(side) for side in names)
    left, right = (
        Recorded(
            [Entry(line, name, 0) for line, name in enumerate(side)], [Detail("api", path, ()) for path in inside], []
        )
        for side, inside in zip(names, paths, strict=True)
    )
    return align(left, right, options)
