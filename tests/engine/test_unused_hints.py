"""Lines of a map, rules of a policy and a prefix that are of no use are listed in the notes of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tensorprobe
from tensorprobe.engine import compare_shard, merge_shards
from tests.builders.runs import call, write

X = np.ones((4, 4), dtype=np.float32)


def runs(tmp_path: Path) -> tuple[Path, Path]:
    def calls(silu: str) -> list[Any]:
        names = ("Functional.gelu.0.forward", f"{silu}.0.forward")
        return [call(name, inputs=[X], outputs=[X], module="layers.0") for name in names]

    steps = {(step, rank): calls("Functional.silu") for step in range(2) for rank in range(2)}
    other = {(step, rank): calls("NPU.npu_silu") for step in range(2) for rank in range(2)}
    return write(tmp_path / "a", steps), write(tmp_path / "b", other)


def hints(notes: list[str]) -> list[str]:
    return [note for note in notes if note.startswith(("this line", "this rule", "no module path"))]


def test_lines_of_a_map_that_pair_nothing_are_listed(tmp_path: Path) -> None:
    lines = [
        "Functional.silu = NPU.npu_silu",
        "Functional.sliu = NPU.npu_sliu   # in neither run",
        "Functional.gleu = Functional.gelu   # renames calls that the baseline does not have",
        "Functional.gelu.7 = Functional.gelu.0",
        "Module.blocks = Module.layers   # the baseline has layers too",
    ]
    (tmp_path / "map.txt").write_text("\n".join(lines))
    result = tensorprobe.compare(*runs(tmp_path), map=tmp_path / "map.txt")
    assert hints(result.summary.notes) == [
        f"this line of the map pairs no calls: {line.partition('   #')[0]}"
        for line in lines[1:3] + lines[4:] + lines[3:4]
    ]


def test_a_line_for_modules_that_renames_paths_is_of_use(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [call("Functional.gelu.0.forward", outputs=[X], module="blocks.0")])
    b = write(tmp_path / "b", [call("Functional.gelu.0.forward", outputs=[X], module="layers.0")])
    (tmp_path / "map.txt").write_text("Module.blocks = Module.layers")
    assert hints(tensorprobe.compare(a, b, map=tmp_path / "map.txt").summary.notes) == []


RULES = """
[[rule]]
call = "Functional.gelu*"
ignore = true

[[rule]]
op = "Functional.gleu"
dtype = "bfloat16"
ignore = true

[[rule]]
call = "Functional.gelu.0.forward"
noise = 2.0
"""


def test_rules_that_decide_nothing_are_listed(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    a, _ = runs(tmp_path)
    notes = hints(tensorprobe.compare(a, a, policy=str(tmp_path / "rules.toml")).summary.notes)
    assert notes == [
        'this rule of the policy applies to no tensor: rule 2 (op = "Functional.gleu", dtype = "bfloat16")',
        'this rule of the policy applies to no tensor: rule 3 (call = "Functional.gelu.0.forward")',
    ]
    compare_shard(a, a, shard="1/1", out=tmp_path / "out", policy=str(tmp_path / "rules.toml"))
    assert hints(merge_shards(tmp_path / "out").summary.notes) == notes


def test_named_policies_list_nothing(tmp_path: Path) -> None:
    a, _ = runs(tmp_path)
    assert hints(tensorprobe.compare(a, a, policy="seed-2024").summary.notes) == []


def test_a_prefix_that_no_path_has_is_listed(tmp_path: Path) -> None:
    a, _ = runs(tmp_path)
    for prefix, told in (("layers.", []), ("modul.", ["no module path begins with the prefix to strip, 'modul.'"])):
        assert hints(tensorprobe.compare(a, a, strip_prefix=prefix).summary.notes) == told
