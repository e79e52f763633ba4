"""A notebook, run for real: results show as cards, and stacks name the cell's code without the frames of IPython."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensorprobe

CELLS = [
    """
import torch, tensorprobe
def step(factor):
    torch.manual_seed(0)
    return (torch.ones(3) * factor).exp()
for name, factor in (("a", 1.0), ("b", 2.0)):
    with tensorprobe.capture(name):
        step(factor)
""",
    'result = tensorprobe.compare("a", "b", prove="off")\nresult',
    "result.show(height=200)",
]


def test_a_notebook_shows_the_answer_and_its_cells(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[-1].data["text/html"] for cell in book.cells[1:]]
    assert "DIVERGED</b>" in shown[0] and shown[1].startswith("<iframe srcdoc=")
    run = tensorprobe.open_run(tmp_path / "a")
    frames = run.stack(run.call("Tensor.exp.0.forward")).frames
    assert [(frame.function, frame.code) for frame in frames] == [
        ("step", "return (torch.ones(3) * factor).exp()"),
        ("<module>", "step(factor)"),
    ]
