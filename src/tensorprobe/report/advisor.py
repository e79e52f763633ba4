"""advisor.txt: what to look at first, for somebody who has just seen that two runs differ.

Three entries, as the older tools of the family wrote them: `Line:` (of the first diverging row in the table, as an editor counts),
`Suspect Nodes:` and `Expert Advice:`. All three are there always; where there is nothing to say, `NA`.
"""

from __future__ import annotations

from tensorprobe.model import Direction, Side
from tensorprobe.model.comparison import Comparison, Divergence, External
from tensorprobe.report import wording
from tensorprobe.text import plain

_NOTHING = "NA"
_ADVICE = {
    "forward output": (
        "The inputs of this call agree and its output does not: the op itself computes something different. "
        "Run it alone on both devices with the recorded inputs. Then check which kernel was chosen, its dtype and accumulation, "
        "and whether arguments or global switches (autocast, TF32, deterministic mode) differ."
    ),
    "forward input": (
        "The inputs of this call already differ, and no recorded call before it made the difference. "
        "Start the capture earlier or at a finer level, and compare data loading, preprocessing and initial weights of the two programs."
    ),
    "backward output": (
        "The incoming gradient agrees and the outgoing gradients do not: the backward of this op differs. "
        "Check first that its forward agrees, since the backward reads tensors saved there; then run this backward alone on both devices."
    ),
    "backward input": (
        "The incoming gradient of this call already differs, and no recorded call made the difference. "
        "Look at the loss, at its scaling, and at parts of the backward that were not recorded (custom functions, compiled regions)."
    ),
    "parameters": (
        "The weights differ before the first recorded call. Load the same checkpoint on both sides and check seeds, "
        "initialisation and conversion of the weights. Later differences mean nothing until the weights are equal."
    ),
    "data": (
        "Tensors that no recorded call made differ: data that the program read or created. "
        "Check the data loader, its seed, order and augmentation, and tensors made on the host, before looking at any op."
    ),
    "structure": (
        "The two programs do not make the same calls here. Compare the source code on both sides: "
        "versions of libraries, a branch taken on one side only, fused or replaced ops. If both are right, pair the calls with --map."
    ),
}
_ALL_WELL = "All pairs of calls are within the tolerance of the policy."
_UNFINISHED = (
    "What both runs have is within the tolerance of the policy, but one of them did not finish. "
    "Find out why it ended there, or compare only the whole steps with --steps."
)
_NOTHING_COMPARED = (
    "No pair of calls could be judged. Check that both runs come from the same program, and how their calls are named."
)


def render_advice(comparison: Comparison, *, line: int | None = None) -> str:
    """Return the text of advisor.txt. `line` is that of the first diverging row in the CSV; the header is line 1."""
    kind, node = _suspect(comparison)
    return render_entries(_advice(comparison, kind), node=node, line=line if kind else None)


def render_entries(advice: str = "", *, node: str = "", line: int | None = None) -> str:
    """Return the three entries for a table of any tool; missing ones are `NA`. The node comes from a run and is escaped."""
    row = _NOTHING if line is None else str(line)
    return f"Line: {row}\nSuspect Nodes: {plain(node) or _NOTHING}\nExpert Advice: {advice or _NOTHING}\n"


def advice_on(direction: Direction, side: Side) -> str:
    """Return the advice if the first diverging tensor is on that side of a call."""
    if side == "parameters":  # those of a backward are its gradients
        return _ADVICE["parameters" if direction == "forward" else "backward output"]
    return _ADVICE[f"{direction} {side}"]


def _advice(comparison: Comparison, kind: str) -> str:
    if not kind:
        told = {"AGREES": _ALL_WELL, "UNFINISHED": _UNFINISHED}.get(wording.headline(comparison), _NOTHING_COMPARED)
        return f"{_NOTHING}\n{told}"
    facts = [_ADVICE[kind]]
    facts += [f"Note that {before}." for before in wording.before_first_call(comparison, limit=5)]
    if (divergence := comparison.divergence) is not None:
        facts.append(f"First at {wording.where(divergence)}; {wording.evidence(divergence)}.")
        if divergence.source is not None:
            facts.append(f"Source: {plain(str(divergence.source))}")
    return " ".join(facts)


def _suspect(comparison: Comparison) -> tuple[str, str]:
    """Return the kind of advice and the name of its tensor or call; both empty if nothing diverges."""
    divergence = comparison.divergence
    external = _blamed(comparison, divergence)
    if external is not None:
        kind = "parameters" if external.kind == "parameter" else "data"
        return kind, f"{external.call}.{external.slot}" if external.call else external.name
    if divergence is None:
        first = comparison.findings[0] if comparison.answer == "diverged" and comparison.findings else None
        return ("structure", first.call) if first is not None else ("", "")
    name = divergence.call or divergence.candidate_call
    if divergence.status == "structural" or divergence.row is None:
        return "structure", name
    side = "input" if divergence.inputs == "diverge" or divergence.row.side == "input" else "output"
    return f"{divergence.direction} {side}", f"{name}.{divergence.row.slot}"


def _blamed(comparison: Comparison, divergence: Divergence | None) -> External | None:
    """Return the parameter or data tensor that explains the divergence, if no call introduced an error."""
    if comparison.answer != "diverged" or not comparison.externals:
        return None
    explains = divergence is None or (divergence.inputs == "diverge" and divergence.status != "introduced")
    if not explains:
        return None
    return next(
        (external for external in comparison.externals if external.kind == "parameter"), comparison.externals[0]
    )
