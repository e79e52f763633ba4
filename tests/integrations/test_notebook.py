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
    "result.divergence",
    "result.divergence.diff()",
    """
try:
    tensorprobe.compare("a", "b", out="result").divergence.replay()
except tensorprobe.TensorprobeError as error:
    why = str(error)
why
""",
]


def test_a_notebook_shows_the_answer_and_its_cells(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[-1].data["text/html"] for cell in book.cells[1:3]]
    texts = [cell.outputs[-1].data["text/plain"] for cell in book.cells[3:]]
    assert texts[0] == "<divergence: Tensor.mul.0.forward, step 0, rank 0, introduced>"
    assert texts[1] == "<diff of Tensor.mul.0.forward: different: output.0; see .slots, .tensor>"
    assert "no replay.py: the recorded results are right for their inputs" in texts[2]
    assert "DIVERGED</b>" in shown[0] and shown[1].startswith("<iframe srcdoc=")
    run = tensorprobe.open_run(tmp_path / "a")
    frames = run.stack(run.call("Tensor.exp.0.forward")).frames
    assert [(frame.function, frame.code) for frame in frames] == [
        ("step", "return (torch.ones(3) * factor).exp()"),
        ("<module>", "step(factor)"),
    ]
