"""advisor.txt: three entries always, and advice that fits where the runs part."""

from __future__ import annotations

import pytest

from tensorprobe.model.comparison import Buckets, Comparison
from tensorprobe.report.advisor import render_advice
from tests.report import made

INHERITED = {"status": "inherited", "inputs": "diverge", "input_error": 0.2}
SITUATIONS: dict[str, tuple[Comparison, str, str]] = {
    "forward output": (made.comparison(), "Torch.matmul.12.forward.output.0", "the op itself"),
    "forward input": (
        made.comparison(divergence=made.divergence(**INHERITED), statuses={"inherited": 3}),
        "Torch.matmul.12.forward.output.0",
        "The inputs of this call already differ",
    ),
    "backward output": (
        made.comparison(divergence=made.divergence(direction="backward")),
        "Torch.matmul.12.forward.output.0",
        "the backward of this op differs",
    ),
    "backward input": (
        made.comparison(divergence=made.divergence(direction="backward", **INHERITED)),
        "Torch.matmul.12.forward.output.0",
        "Look at the loss",
    ),
    "parameters": (
        made.comparison(
            divergence=made.divergence(**INHERITED), externals=[made.external(kind="data"), made.external()]
        ),
        "Functional.linear.3.forward.input.1",
        "The weights differ before the first recorded call",
    ),
    "data": (
        made.comparison(divergence=made.divergence(**INHERITED), externals=[made.external(kind="data", name="x")]),
        "Functional.linear.3.forward.input.1",
        "Check the data loader",
    ),
    "structure": (
        made.comparison(divergence=made.structural()),
        "Torch.add.3.forward",
        "do not make the same calls here",
    ),
    "only findings": (
        made.comparison(divergence=None, answer="diverged", exit_code=1, findings=[made.finding()]),
        "Torch.add.3.forward",
        "do not make the same calls here",
    ),
}


@pytest.mark.parametrize(("comparison", "node", "advice"), SITUATIONS.values(), ids=SITUATIONS)
def test_the_advice_fits_the_place(comparison: Comparison, node: str, advice: str) -> None:
    line, nodes, expert = render_advice(comparison, line=17).splitlines()
    assert line == "Line: 17"
    assert nodes == f"Suspect Nodes: {node}"
    assert expert.startswith("Expert Advice: ")
    assert advice in expert


def test_the_advice_differs_for_each_place() -> None:
    first_words = {render_advice(held).splitlines()[2][:60] for held, _, _ in SITUATIONS.values()}
    assert len(first_words) == len(SITUATIONS) - 1  # the two of structure are one


def test_an_error_that_a_call_introduced_is_not_blamed_on_weights() -> None:
    text = render_advice(made.comparison(externals=[made.external()]))
    assert "Suspect Nodes: Torch.matmul.12.forward.output.0\n" in text
    assert "Note that parameters differ before step 0: layers.3.weight, scaled by 1.01." in text
    assert "Source: model.py:88 in forward: y = x @ w" in text


def test_nothing_wrong_is_na() -> None:
    text = render_advice(made.agreeing(), line=17)
    assert text.splitlines() == [
        "Line: NA",
        "Suspect Nodes: NA",
        "Expert Advice: NA",
        "All pairs of calls are within the tolerance of the policy.",
    ]


def test_nothing_compared_is_not_nothing_wrong() -> None:
    text = render_advice(made.agreeing(buckets=Buckets(only_baseline=3), exit_code=2))
    assert "within what the policy allows" not in text
    assert "No pair of calls could be judged" in text


def test_a_line_that_is_not_known_is_na() -> None:
    assert render_advice(made.comparison()).startswith("Line: NA\nSuspect Nodes: Torch")


def test_a_hostile_name_adds_no_entry() -> None:
    text = render_advice(made.hostile(), line=2)
    assert len(text.splitlines()) == 3
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []
