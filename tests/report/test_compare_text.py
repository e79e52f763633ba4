"""The words of compare: the answer first, how much against how much, what was not seen, the next command last."""

from __future__ import annotations

import math

import msgspec
import pytest

from tensorprobe.model.comparison import STATUSES, Buckets
from tensorprobe.report import wording
from tensorprobe.report.compare_text import render_comparison
from tests.report import made


def lines(**changes: object) -> list[str]:
    return render_comparison(made.comparison(**changes)).splitlines()


def test_a_divergence_is_told_as_in_the_style_guide() -> None:
    assert lines() == [
        "DIVERGED  first at step 3, rank 0: Torch.matmul.12.forward in module 'layers.7.mlp.down_proj', "
        "output.0 (bfloat16 [8, 4096])   model.py:88",
        "          inputs agree exactly; max |Δ| 3.1e-02 at [4, 17], relative L2 2.4e-01 (allowed 1.6e-02): introduced here",
        "1,204 calls: 1,187 agree · 9 diverge (1 introduced · 8 inherited) · 5 only in baseline · 2 only in candidate"
        " · 1 skipped (no tensor)",
        "5,120 pairs of tensors: 4,000 by values · 1,120 by equal digests; policy noise-aware, 3.25 s",
        "baseline   runs/cuda (tensor, cuda:0, torch 2.13.0): 1,300 calls seen, 1,203 recorded, 97 filtered, 0 failed",
        "candidate  runs/npu (tensor, npu:0, torch 2.13.0): 1,300 calls seen, 1,203 recorded, 97 filtered, 0 failed",
        "Look at it:   tensorprobe diff runs/cuda runs/npu Torch.matmul.12.forward --step 3 --rank 0",
    ]


def test_agreement_is_one_line_and_its_evidence() -> None:
    text = render_comparison(made.agreeing()).splitlines()
    assert text[:3] == [
        "AGREES    no output diverges in 1,196 pairs of calls, 4 steps, 1 rank",
        "Calls with identical inputs have bit-identical outputs",
        "1,196 calls: 1,196 agree",
    ]
    assert text[-1].startswith("candidate  ")


def test_bits_are_not_called_equal_where_only_statistics_were_compared() -> None:
    text = render_comparison(made.agreeing(bases={"values": 5000, "statistics": 120}))
    assert "any bit" not in text
    assert "5,000 by values · 120 by statistics only (weaker);" in text


def test_a_difference_in_bits_that_is_allowed_is_told() -> None:
    row = made.row(verdict="agrees", max_abs=1e-7, relative_l2=2e-8, measured=2e-8)
    text = render_comparison(made.agreeing(first_difference=made.divergence(status="agrees", row=row)))
    assert (
        "First difference in any bit: step 3, rank 0: Torch.matmul.12.forward in module 'layers.7.mlp.down_proj', output.0 "
        "(bfloat16 [8, 4096]): max |Δ| 1.0e-07 at [4, 17], relative L2 2.0e-08 (allowed 1.6e-02)\n"
    ) in text


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ({"step": 3, "index": 39}, True),
        ({"step": 2, "index": 90}, True),
        ({"step": 3, "index": 40}, False),
        ({"step": 3, "index": 41}, False),
        ({"step": 3, "index": 1, "rank": 1}, False),
        ({"step": 2, "index": 90, "rank": 1}, True),
    ],
)
def test_the_first_difference_is_told_when_it_stands_before_the_divergence(place: dict[str, int], told: bool) -> None:
    assert ("First difference" in "\n".join(lines(first_difference=made.divergence(**place)))) is told


def test_amplified_noise_is_told_when_all_agree() -> None:
    text = render_comparison(made.agreeing(statuses={"agrees": 1190, "amplified": 6})).splitlines()
    assert text[1] == "          6 calls amplify the noise of their inputs"
    assert "1,196 calls: 1,190 agree · 6 amplified noise" in text


def test_an_inherited_error_has_its_cause_before_the_capture() -> None:
    inherited = made.divergence(status="inherited", inputs="diverge", input_error=0.2)
    told = lines(divergence=inherited, statuses={"agrees": 1187, "inherited": 9})
    assert told[1].startswith("          inputs diverge (relative L2 2.0e-01); max |Δ| 3.1e-02")
    assert told[1].endswith(": inherited from its inputs")
    assert told[2] == "          no call introduces an error: the cause is before the captured part"
    known = lines(divergence=inherited, statuses={"inherited": 9}, externals=[made.external()])
    assert (
        known[2] == "          no call introduces an error: it comes from the tensors that differ before the first call"
    )
    assert known[3] == "parameters differ before step 0: layers.3.weight, scaled by 1.01"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("identical", "inputs agree exactly;"),
        ("agree", "inputs agree within noise (relative L2 3.0e-07);"),
        ("unknown", "inputs not recorded;"),
    ],
)
def test_it_says_whether_inputs_agreed(inputs: str, words: str) -> None:
    assert words in lines(divergence=made.divergence(inputs=inputs, input_error=3e-7))[1]


@pytest.mark.parametrize(
    ("judged_by", "measured", "allowed", "words"),
    [
        ("max_abs", 0.031, 0.001, "max |Δ| 3.1e-02 at [4, 17] (allowed 1.0e-03), relative L2 2.4e-01:"),
        ("slope", 0.0101, 0.002, "relative L2 2.4e-01, slope off 1 by 1.0e-02 (allowed 2.0e-03):"),
        ("one_minus_cosine", 0.02, 0.01, "1 - cosine 2.0e-02 (allowed 1.0e-02):"),
        ("different", 1234.0, 0.0, "elements that differ 1,234 (allowed 0):"),
        ("bit_identical", 1.0, 0.0, "relative L2 2.4e-01, no difference in any bit is allowed:"),
        ("ulp_over_4", 0.25, 0.125, "share of elements more than 4 ULP apart 0.25 (allowed 0.125):"),
        ("ulp_max", 12.5, math.inf, "greatest distance in ULP 12.5 (allowed inf):"),
        ("my_rule", 3.0, math.nan, "relative L2 2.4e-01, my rule 3:"),
        ("other_digest", math.nan, math.nan, "relative L2 2.4e-01, other digest:"),
    ],
)
def test_the_figure_that_decided_stands_beside_what_was_allowed(
    judged_by: str, measured: float, allowed: float, words: str
) -> None:
    row = made.row(judged_by=judged_by, measured=measured, allowed=allowed)
    assert words in lines(divergence=made.divergence(row=row))[1]


@pytest.mark.parametrize(
    ("index", "shape", "words"),
    [
        (4096, "[8, 4096]", "NaN/inf in 3 places, first at [1, 0], max"),
        (0, "[]", "NaN/inf in 3 places, first at [], max"),
        (5, "nonsense", "NaN/inf in 3 places, first at element 5, max"),
        (5, '["a"]', "NaN/inf in 3 places, first at element 5, max"),
        (-1, "[8]", "NaN/inf in 3 places, max"),
    ],
)
def test_places_that_are_not_finite_are_told(index: int, shape: str, words: str) -> None:
    row = made.row(nonfinite_different=3, nonfinite_index=index, baseline_shape=shape)
    assert words in lines(divergence=made.divergence(row=row))[1]


@pytest.mark.parametrize(("place", "flat"), [([], 4 * 4096 + 17), ([4, 17], -1)])
def test_the_place_of_the_error_is_found_from_either_index(place: list[int], flat: int) -> None:
    at = made.divergence(place=place, row=made.row(max_abs_index=flat))
    assert "max |Δ| 3.1e-02 at [4, 17]" in lines(divergence=at)[1]


def test_a_row_of_statistics_has_no_elementwise_error() -> None:
    row = made.row(max_abs=math.nan, relative_l2=math.nan, judged_by="norm_ratio", measured=0.25, allowed=0.01)
    assert (
        "exactly; norm ratio off 1 by 2.5e-01 (allowed 1.0e-02): introduced"
        in lines(divergence=made.divergence(row=row))[1]
    )


def test_other_names_dtypes_and_shapes_of_the_candidate_are_told() -> None:
    row = made.row(candidate_dtype="float32", candidate_shape="[8, 4097]")
    told = lines(divergence=made.divergence(candidate_call="Torch.matmul.13.forward", row=row))
    assert "Torch.matmul.12.forward (Torch.matmul.13.forward in the candidate) in module 'layers." in told[0]
    assert "output.0 (bfloat16 [8, 4096], float32 [8, 4097] in the candidate)" in told[0]
    assert told[-1].endswith("tensorprobe diff runs/cuda runs/npu Torch.matmul.12.forward --step 3 --rank 0")


STRUCTURES = [
    ("only_baseline", "", "only in baseline"),
    ("only_candidate", "", "only in candidate"),
    ("raised", "RuntimeError in the candidate", "raised RuntimeError in the candidate"),
    ("raised", "raised RuntimeError in the candidate", "raised RuntimeError in the candidate"),
    ("shape", "input.0 [8] and [9]", "different shape: input.0 [8] and [9]"),
    ("dtype", "output.0", "different dtype: output.0"),
    ("arguments", "dim 0 and 1", "different arguments: dim 0 and 1"),
    ("slots", "", "different tensors"),
]


@pytest.mark.parametrize(("kind", "detail", "words"), STRUCTURES)
def test_a_divergence_of_structure_says_what_is_different(kind: str, detail: str, words: str) -> None:
    told = lines(divergence=made.structural(finding=made.finding(kind=kind, detail=detail)))
    assert (
        told[0] == f"DIVERGED  first at step 0, rank 0: Torch.add.3.forward in module 'layers.0', {words}   model.py:12"
    )
    wanted = {
        "only_baseline": "the candidate makes no such call; nearest: Torch.add.2.forward",
        "only_candidate": "the baseline makes no such call; nearest: Torch.add.2.forward",
    }
    assert told[1].strip() == wanted.get(kind, "inputs agree exactly: the two calls differ")


def test_a_structural_call_is_told_by_its_structure_although_a_tensor_was_measured() -> None:
    about = made.finding(kind="shape", detail="output.0: [8] in baseline, [9] in candidate")
    told = lines(divergence=made.structural(finding=about, row=made.row(), candidate_call=about.call))
    assert "layers.0', different shape: output.0: [8] in baseline, [9] in candidate   model.py:12" in told[0]
    assert "|Δ|" not in told[1]


def test_other_arguments_are_told_beside_the_error_they_may_have_made() -> None:
    about = made.finding(kind="arguments", detail="argument [1]: 0.1 in baseline, 0.2 in candidate")
    assert lines(divergence=made.divergence(finding=about))[1].endswith(
        ": introduced here; different arguments: argument [1]: 0.1 in baseline, 0.2 in candidate"
    )


def test_the_place_of_nan_is_not_taken_for_the_place_of_the_error() -> None:
    row = made.row(nonfinite_different=1, nonfinite_index=4096, max_abs_index=2, judged_by="nonfinite_different")
    assert (
        "NaN/inf in 1 place, first at [1, 0], max |Δ| 3.1e-02 at [0, 2], relative L2 2.4e-01: introduced"
        in (lines(divergence=made.divergence(row=row, place=[1, 0]))[1])
    )


def test_a_call_that_only_the_baseline_has_is_looked_at_there() -> None:
    assert lines(divergence=made.structural())[-1] == (
        "Look at it:   tensorprobe inspect runs/cuda Torch.add.3.forward --step 0 --rank 0"
    )
    extra = made.structural(finding=made.finding(kind="only_candidate"), call="", candidate_call="Torch.add.3.forward")
    assert "tensorprobe inspect runs/npu Torch.add.3.forward" in lines(divergence=extra)[-1]


def test_findings_are_listed_and_the_rest_counted() -> None:
    findings = [made.finding(index=index) for index in range(4)]
    told = render_comparison(made.comparison(findings=findings, findings_total=700), limit=2).splitlines()
    at = told.index(
        "700 calls or arguments differ (5 only in baseline, 2 only in candidate, "
        "693 with different arguments, shapes or dtypes), the first 2:"
    )
    assert told[at + 1] == (
        "  step 0, rank 0: Torch.add.3.forward in module 'layers.0', only in baseline   model.py:12; nearest: Torch.add.2.forward"
    )
    assert told[at + 3].startswith("1,204 calls")


def test_parameters_and_data_from_before_the_first_call_are_told_by_rank() -> None:
    externals = [made.external(rank=rank) for rank in (0, 1)]
    externals += [made.external(name=f"layers.{number}.bias", detail="") for number in range(4)]
    externals.append(made.external(kind="data", name="tokens", slot="input.0", detail="max |Δ| 1", rank=1))
    told = render_comparison(
        made.comparison(externals=externals, ranks=[made.rank_answer(0), made.rank_answer(1)]), limit=3
    )
    assert (
        "\nparameters differ before step 0: layers.3.weight, scaled by 1.01 (ranks 0, 1); layers.0.bias (rank 0); "
        "layers.1.bias (rank 0); and 2 more\n"
        "data differ before step 0: tokens (input.0 of Functional.linear.3.forward), max |Δ| 1 (rank 1)\n"
    ) in told


def test_other_ranks_are_told_together_where_they_part_together() -> None:
    late = made.divergence(step=9)
    answers = [made.rank_answer(rank, divergence=made.divergence(rank=rank)) for rank in range(12)]
    answers += [made.rank_answer(12, divergence=late), made.rank_answer(13), made.rank_answer(14)]
    told = lines(ranks=answers)
    at = told.index("12 other ranks diverge, first at")
    assert told[at + 1 : at + 4] == [
        "  ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more: step 3: Torch.matmul.12.forward in module 'layers.7.mlp.down_proj', "
        "output.0 (bfloat16 [8, 4096]): introduced here",
        "  rank 12: step 9: Torch.matmul.12.forward in module 'layers.7.mlp.down_proj', output.0 (bfloat16 [8, 4096]): introduced here",
        "2 of 15 ranks agree: ranks 13, 14",
    ]


def test_of_many_places_on_other_ranks_the_rest_is_counted() -> None:
    answers = [made.rank_answer(rank, divergence=made.divergence(rank=rank, step=rank)) for rank in range(9)]
    told = render_comparison(made.comparison(ranks=answers), limit=3).splitlines()
    at = told.index("8 other ranks diverge, first at")
    assert [line[:9] for line in told[at + 1 : at + 4]] == ["  rank 1:", "  rank 2:", "  rank 3:"]
    assert told[at + 4] == "  and at 5 other places"


@pytest.mark.parametrize("statuses", [dict.fromkeys(STATUSES, 10), {"agrees": 59, "structural": 1}, {"agrees": 50}])
def test_the_counts_add_up(statuses: dict[str, int]) -> None:
    buckets = Buckets(paired=70, only_baseline=3, only_candidate=4, skipped={"no tensor": 2, "other": 1})
    text = wording.counts(made.comparison(buckets=buckets, statuses=statuses))
    total, _, parts = text.partition(" calls: ")
    without_brackets = parts.replace("(10 introduced · 10 entered · 10 inherited) ", "").replace(
        "(no tensor 2, other 1)", ""
    )
    assert int(total) == 80 == sum(int(part.split()[0]) for part in without_brackets.split(" · "))


def test_nothing_paired_is_no_agreement() -> None:
    empty = made.agreeing(buckets=Buckets(only_baseline=3, only_candidate=4), statuses={}, exit_code=2)
    text = render_comparison(empty).splitlines()
    assert text[0] == "CANNOT COMPARE  0 of 7 calls have a partner"
    assert text[-1] == "Look at them: tensorprobe inspect runs/cuda"
    assert render_comparison(msgspec.structs.replace(empty, exit_code=0)).startswith("CANNOT COMPARE")
    unmeasured = made.agreeing(exit_code=2, statuses={"unmeasured": 1196})
    assert render_comparison(unmeasured).startswith("CANNOT COMPARE  nothing was measured in 1,196 pairs of calls\n")


def test_a_divergence_without_a_call_is_still_one() -> None:
    changes = {"divergence": None, "answer": "diverged", "exit_code": 1}
    assert lines(**changes, externals=[made.external()])[0] == "DIVERGED  before the first call"
    assert lines(**changes, findings=[made.finding()])[0] == "DIVERGED  the runs make different calls"


def test_what_was_not_seen_is_said() -> None:
    killed = made.side(closed=False, seen=0, recorded=0, filtered=0)
    blind = made.side("runs/a b", blind_spots={"jit.script": 2, "compiled": 1}, failed=6)
    told = lines(baseline=blind, candidate=killed, notes=["weaker: compared by statistics, no values"], output="out")
    assert told[-5:-1] == [
        "baseline   runs/a b (tensor, npu:0, torch 2.13.0): 1,300 calls seen, 1,203 recorded, 97 filtered, 6 failed; "
        "blind spots: jit.script 2, compiled 1",
        "candidate  runs/npu (tensor, npu:0, torch 2.13.0): 1,203 calls read, coverage unknown; not closed",
        "note       weaker: compared by statistics, no values",
        "Full table: out",
    ]


def test_the_command_can_be_pasted() -> None:
    told = lines(candidate=made.side("runs/a b; rm -rf ~"))
    assert told[-1].startswith("Look at it:   tensorprobe diff runs/cuda 'runs/a b; rm -rf ~' Torch")


def test_nothing_from_a_run_commands_the_terminal() -> None:
    text = render_comparison(made.hostile())
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []
    assert not any(line.startswith("::") for line in text.splitlines())
    assert len(text.splitlines()) == 16
