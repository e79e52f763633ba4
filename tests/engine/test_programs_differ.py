"""What differs between two programs is printed under the headline, before what the policy says of their calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tensorprobe
from tests.builders.runs import call, write, write_manifest

X = np.ones((4, 4), dtype=np.float32)


def run(root: Path, value: float, **manifest: Any) -> Path:
    write(root, [call("Functional.gelu.0.forward", inputs=[X], outputs=[X * value])])
    write_manifest(root, **manifest)
    return root


def test_what_differs_stands_before_the_details(tmp_path: Path) -> None:
    one = run(tmp_path / "a", 1.0, version=2, provenance={"switches": {"threads": 1}, "seed": 7})
    other = run(tmp_path / "b", 2.0, version=2, torch="2.6.0", provenance={"switches": {"threads": 8}, "seed": 7})
    lines = str(tensorprobe.compare(one, other)).splitlines()
    assert lines[0].startswith("DIVERGED  first at step 0")
    assert [line.strip() for line in lines[1:3]] == [
        "the programs differ in threads: 1 / 8",
        "the programs differ in torch: 2.13.0 / 2.6.0",
    ]
    assert "inputs agree exactly" in lines[3]


def test_a_run_of_an_older_format_is_compared_and_says_what_it_lacks(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a", 1.0, version=1), run(tmp_path / "b", 1.0, version=2, provenance={"seed": 7})
    result = tensorprobe.compare(one, other)
    assert result.exit_code == 0
    assert [note for note in result.summary.notes if note.startswith("the baseline: format 1 does not record")]
    assert not any("the candidate: format" in note for note in result.summary.notes)
