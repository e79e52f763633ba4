"""Which call belongs to which: laws over generated trainings, then each rule by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.pairing.align import Alignment, Detail, Options, align_calls
from tensorprobe.record.run import Entry

from .call_sequences import Made, Plan, Recorded, align, by_names, record, transformer

PLANS = st.builds(Plan, st.integers(1, 3), st.just(4), st.booleans(), st.booleans())
FEW = settings(max_examples=60, deadline=None)


def assert_true_pairs(alignment: Alignment, baseline: Recorded, candidate: Recorded) -> None:
    """Every call that both sides have is paired with itself, and nothing else is paired."""
    wrong = [(i, j) for i, j in alignment.pairs if baseline.truth[i] != candidate.truth[j]]
    assert not wrong, [(baseline.entries[i].name, candidate.entries[j].name) for i, j in wrong[:5]]
    assert len(alignment.pairs) == len(set(baseline.truth) & set(candidate.truth))


def is_distinguishable(calls: Sequence[Made], place: int) -> bool:
    """Whether no neighbour of a call looks just like it."""
    look = calls[place][:3]
    return all(calls[near][:3] != look for near in (place - 1, place + 1) if 0 <= near < len(calls))


def names_only(side: str) -> Sequence[Detail]:
    raise AssertionError(f"the details of the {side} were read")


@FEW
@given(PLANS, st.booleans())
def test_a_run_is_aligned_with_itself_without_reading_details(plan: Plan, backward: bool) -> None:
    run = record(transformer(plan), backward=backward)
    alignment = align_calls(run.entries, run.entries, names_only)
    assert alignment.pairs == [(i, i) for i in range(len(run.entries))]
    assert alignment.how == {"name": len(run.entries)}


@FEW
@given(PLANS, st.data())
def test_deleted_calls_are_exactly_those_without_partner(plan: Plan, data: st.DataObject) -> None:
    calls = transformer(plan)
    distinguishable = [place for place in range(len(calls)) if is_distinguishable(calls, place)]
    gone = data.draw(st.sets(st.sampled_from(distinguishable), max_size=4 if plan.modules else 1))
    baseline = record(calls)
    candidate = record([call for place, call in enumerate(calls) if place not in gone])
    alignment = align(baseline, candidate)
    assert alignment.only_candidate == []
    assert len(alignment.only_baseline) == len(baseline.entries) - len(candidate.entries)
    if (plan.modules and all(abs(one - other) > 8 for one in gone for other in gone if one != other)) or len(gone) == 1:
        assert_true_pairs(alignment, baseline, candidate)


@FEW
@given(PLANS, st.data())
def test_any_deleted_calls_leave_their_number_without_partner(plan: Plan, data: st.DataObject) -> None:
    calls = transformer(plan)
    gone = data.draw(st.sets(st.integers(0, len(calls) - 1), max_size=len(calls)))
    baseline, candidate = (
        record(calls, backward=False),
        record([call for place, call in enumerate(calls) if place not in gone], backward=False),
    )
    alignment = align(baseline, candidate)
    assert len(alignment.only_baseline) == len(gone)
    assert alignment.only_candidate == []


@FEW
@given(PLANS, st.data())
def test_inserted_calls_shift_nothing(plan: Plan, data: st.DataObject) -> None:
    calls = transformer(plan)
    inserted = list(calls)
    for at in data.draw(st.sets(st.integers(0, len(calls)), max_size=3)):
        model = data.draw(st.sampled_from(calls))
        inserted.insert(at, Made(model.op, "inserted", model.signature, ("new", at)))
    baseline, candidate = record(calls), record(inserted)
    alignment = align(baseline, candidate)
    if plan.modules:
        assert_true_pairs(alignment, baseline, candidate)
    assert alignment.only_baseline == []


@FEW
@given(PLANS, st.data())
def test_swapping_the_sides_swaps_everything(plan: Plan, data: st.DataObject) -> None:
    calls = transformer(plan)
    sides = []
    for _ in range(2):
        gone = data.draw(st.sets(st.integers(0, len(calls) - 1), max_size=6))
        sides.append(record([call for place, call in enumerate(calls) if place not in gone]))
    alignment, swapped = align(sides[0], sides[1]), align(sides[1], sides[0])
    assert sorted((i, j) for j, i in swapped.pairs) == alignment.pairs
    assert (swapped.only_candidate, swapped.only_baseline) == (alignment.only_baseline, alignment.only_candidate)


@FEW
@given(PLANS, st.randoms(use_true_random=False))
def test_another_order_of_the_same_names_changes_no_pair(plan: Plan, chance: random.Random) -> None:
    run = record(transformer(plan))
    order = list(range(len(run.entries)))
    chance.shuffle(order)
    shuffled = Recorded(*([column[place] for place in order] for column in run))
    assert_true_pairs(align(run, shuffled), run, shuffled)


@FEW
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans(), st.integers(0, 2)), max_size=30),
    st.data(),
)
def test_every_call_is_in_one_bucket_whatever_the_run_says(
    drawn: list[tuple[str, int, bool, int]], data: st.DataObject
) -> None:
    """Names that occur twice, backwards without forwards, repetitions of nothing."""

    def run(rows: list[tuple[str, int, bool, int]]) -> Recorded:
        entries = [
            Entry(line, f"Tensor.{op}.{number}.{'backward' if back else 'forward'}", repeat)
            for line, (op, number, back, repeat) in enumerate(rows)
        ]
        return Recorded(entries, [Detail("api", op, number) for op, number, _, _ in rows], [])

    other = data.draw(st.permutations(drawn))[: data.draw(st.integers(0, 30))]
    for options in (Options(), Options(fuzzy=True)):
        align(run(drawn), run(other), options)


def test_recomputed_calls_go_with_the_same_repetition_of_the_partner() -> None:
    calls = transformer()
    del calls[5]

    def is_recomputed(made: Made) -> bool:
        return made.module.startswith("blocks")

    baseline, candidate = record(transformer(), recomputed=is_recomputed), record(calls, recomputed=is_recomputed)
    alignment = align(baseline, candidate)
    assert_true_pairs(alignment, baseline, candidate)
    assert len(alignment.only_baseline) == 3


def test_checkpointing_on_one_side_leaves_only_the_repetitions_without_partner() -> None:
    baseline, candidate = record(transformer()), record(transformer(), recomputed=lambda made: True)
    alignment = align_calls(baseline.entries, candidate.entries, names_only)
    assert_true_pairs(alignment, baseline, candidate)
    assert {candidate.entries[row].repeat for row in alignment.only_candidate} == {1}


def test_another_batch_size_pairs_completely_by_name() -> None:
    baseline, candidate = record(transformer()), record(transformer(Plan(batch=8)))
    assert_true_pairs(align(baseline, candidate), baseline, candidate)


@pytest.mark.parametrize("place", [2, 4, 13, 20, 40])
def test_another_batch_size_and_one_missing_call(place: int) -> None:
    calls = transformer(Plan(batch=8))
    del calls[place]
    baseline, candidate = record(transformer()), record(calls)
    alignment = align(baseline, candidate)
    assert_true_pairs(alignment, baseline, candidate)
    assert alignment.how == {"sequence": len(candidate.entries)}


def test_a_call_with_another_shape_at_the_same_place_is_a_pair() -> None:
    calls = transformer()
    calls[18] = calls[18]._replace(signature="other")
    del calls[3]
    baseline, candidate = record(transformer()), record(calls)
    assert_true_pairs(align(baseline, candidate), baseline, candidate)


def test_signatures_tell_equal_ops_in_one_module_apart() -> None:
    calls = [Made("Tensor.add", "block", shape, shape) for shape in ("a", "b", "c")]
    baseline, candidate = record(calls), record(calls[1:])
    assert_true_pairs(align(baseline, candidate), baseline, candidate)


def test_neighbours_tell_equal_calls_apart() -> None:
    calls = [
        Made(op, "block", (), identity)
        for identity, op in enumerate("Tensor.add Tensor.mul Tensor.add Tensor.div Tensor.add Tensor.sub".split())
    ]
    for missing in (0, 2, 4):
        baseline, candidate = record(calls), record(calls[:missing] + calls[missing + 1 :])
        assert_true_pairs(align(baseline, candidate), baseline, candidate)


def test_an_op_that_only_one_side_has_needs_no_details() -> None:
    calls = transformer()
    more = [*calls[:7], Made("Functional.relu", "x", (), "new"), *calls[7:]]
    baseline, candidate = record(calls), record(more)
    alignment = align_calls(baseline.entries, candidate.entries, names_only)
    assert_true_pairs(alignment, baseline, candidate)
    assert [candidate.entries[row].name for row in alignment.only_candidate] == [
        "Functional.relu.0.forward",
        "Functional.relu.0.backward",
    ]


def test_one_call_missing_here_and_another_there_is_not_hidden_by_equal_numbers() -> None:
    calls = transformer()
    dropouts = [place for place, call in enumerate(calls) if call.op == "Functional.dropout"]
    baseline = record([call for place, call in enumerate(calls) if place != dropouts[0]])
    candidate = record([call for place, call in enumerate(calls) if place != dropouts[-1]])
    alignment = align(baseline, candidate)
    assert_true_pairs(alignment, baseline, candidate)
    assert len(alignment.only_baseline) == len(alignment.only_candidate) == 2


def test_only_backwards_recorded_are_aligned_by_their_order() -> None:
    calls = transformer()
    baseline, candidate = record(calls, forward=False), record(calls[:9] + calls[10:], forward=False)
    assert_true_pairs(align(baseline, candidate), baseline, candidate)


def test_backwards_find_each_other_when_one_side_has_no_forwards() -> None:
    calls = transformer()
    baseline, candidate = record(calls), record(calls[:9] + calls[10:], forward=False)
    assert_true_pairs(align(baseline, candidate), baseline, candidate)


def test_the_backward_of_a_missing_call_does_not_take_another_backward() -> None:
    add = [Made("Tensor.add", f"blocks.{place}", (), place) for place in range(4)]
    other = Made("Tensor.add", "blocks.1", (), "new")
    baseline = record([add[0], add[1], add[2]])
    candidate = record([add[0], add[2], add[3], other])
    assert_true_pairs(align(baseline, candidate), baseline, candidate)


def test_at_level_aten_forward_and_backward_are_counted_apart() -> None:
    def run(forwards: list[str], backwards: list[str]) -> Recorded:
        rows = [(module, "forward") for module in forwards] + [(module, "backward") for module in backwards]
        numbers = [*range(len(forwards)), *range(len(backwards))]
        return Recorded(
            [
                Entry(i, f"Aten.mm.default.{n}.{way}", 0)
                for i, (n, (_, way)) in enumerate(zip(numbers, rows, strict=True))
            ],
            [Detail("aten", module, ()) for module, _ in rows],
            [(module, way, 0) for module, way in rows],
        )

    baseline = run(["a", "b", "c"], ["c", "b", "b2", "a"])
    candidate = run(["b", "c"], ["c", "b", "b2"])
    assert_true_pairs(align(baseline, candidate), baseline, candidate)


def test_older_spellings_and_aliases_are_the_same_names() -> None:
    ours = ["Functional.conv2d.0.forward", "Tensor.add.0.forward", "VF.lstm.0.forward", "Module.a.Linear.forward.0"]
    theirs = [
        "Functional_conv2d_0_forward",
        "Tensor.__add__.0.forward",
        "Torch_lstm_0_forward",
        "Module_a_Linear_0_forward",
    ]
    assert by_names(ours, theirs).how == {"name": 4}


def test_two_spellings_of_one_op_are_counted_together() -> None:
    ours = [f"Tensor.add.{number}.forward" for number in range(4)] + ["Tensor.add.2.backward"]
    theirs = [f"Tensor.{op}.forward" for op in ("add.0", "__add__.0", "__radd__.0", "add.1")]
    alignment = by_names(ours, [*theirs, "Tensor.__radd__.0.backward"])
    assert alignment.pairs == [(i, i) for i in range(5)]
    assert alignment.how == {"name": 5}


def test_numbers_that_start_at_one_pair_by_order() -> None:
    ours = ["Tensor.add.0.forward", "Tensor.mul.0.forward", "Tensor.add.1.forward", "Tensor.add.1.backward"]
    theirs = ["Tensor_add_1_forward", "Tensor_mul_1_forward", "Tensor_add_2_forward", "Tensor_add_2_backward"]
    assert by_names(ours, theirs).pairs == [(0, 0), (1, 1), (2, 2), (3, 3)]


def names(op: str, *numbers: int) -> list[str]:
    return [f"{op}.{number}.forward" for number in numbers]


def paired_names(baseline: list[str], candidate: list[str], *modules: list[str]) -> set[tuple[str, str]]:
    alignment = by_names(baseline, candidate, modules=(modules[0], modules[1]) if modules else None)
    return {(baseline[i], candidate[j]) for i, j in alignment.pairs}


@pytest.mark.parametrize("recorded", [(3,), (1,), (0, 2, 3, 5), (4, 5), (1, 2, 3)])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_numbers_with_holes_are_the_programs_own(recorded: tuple[int, ...], swapped: bool) -> None:
    whole, part = names("Tensor.add", *range(6)), names("Tensor.add", *recorded)
    found = paired_names(*((part, whole) if swapped else (whole, part)))
    assert found == {(name, name) for name in part}


def test_holes_on_both_sides_leave_alone_what_only_one_has() -> None:
    ours, theirs = names("Tensor.add", 0, 2, 3, 9), names("Tensor.add", 0, 1, 3, 7)
    assert paired_names(ours, theirs) == {(name, name) for name in names("Tensor.add", 0, 3)}


def test_a_hole_in_one_op_changes_nothing_for_another_whose_numbers_have_shifted() -> None:
    ours = names("Tensor.add", 0, 1, 2) + names("Tensor.mul", 0, 1)
    theirs = names("Tensor.add", 0, 2) + names("Tensor.mul", 0, 1, 2)
    found = paired_names(ours, theirs, ["a", "b", "c", "d", "e"], ["a", "c", "new", "d", "e"])
    assert found == {
        *((name, name) for name in names("Tensor.add", 0, 2)),
        *zip(names("Tensor.mul", 0, 1), names("Tensor.mul", 1, 2), strict=True),
    }


def test_numbers_with_holes_that_have_shifted_pair_by_module() -> None:
    """A selection of modules; one more call was made before them."""
    ours, theirs = names("Tensor.add", 3, 4, 5), names("Tensor.add", 4, 5, 6)
    modules = ["head.a", "head.b", "head.c"]
    assert paired_names(ours, theirs, modules, modules) == {*zip(ours, theirs, strict=True)}


def test_the_order_of_the_lines_does_not_matter_where_numbers_have_holes() -> None:
    ours, theirs = names("Tensor.add", 0, 1, 2, 3), names("Tensor.add", 3, 0)
    assert paired_names(ours, theirs, ["a", "b", "c", "d"], ["x", "y"]) == {(name, name) for name in theirs}


def test_backwards_follow_a_forward_that_was_paired_by_its_number() -> None:
    ours = [f"Tensor.add.{number}.{way}" for way in ("forward", "backward") for number in range(4)]
    theirs = ["Tensor.add.2.forward", "Tensor.add.2.backward"]
    assert paired_names(ours, theirs) == {(name, name) for name in theirs}


@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_a_backward_whose_forward_is_lost_on_one_side_keeps_its_partner(lost: int, swapped: bool) -> None:
    whole = [f"Tensor.add.{number}.{way}" for way in ("forward", "backward") for number in range(4)]
    part = [name for name in whole if name != f"Tensor.add.{lost}.forward"]
    found = paired_names(*((part, whole) if swapped else (whole, part)))
    assert found == {(name, name) for name in part}


@pytest.mark.parametrize("number", ["9" * 30, "9" * 6000, "٣"])
def test_numbers_beyond_reason_pair_with_themselves_only(number: str) -> None:
    ours, theirs = ["Tensor.add.0.forward", f"Tensor.add.{number}.forward"], [f"Tensor.add.{number}.forward"]
    assert paired_names(ours, theirs) == {(theirs[0], theirs[0])}


def test_a_wrapped_side_pairs_after_stripping() -> None:
    calls = transformer(Plan(module_calls=True))
    wrapped = [
        call._replace(
            op=call.op.replace("Module.", "Module.module.") if call.op != "Module.GPT" else call.op,
            module=f"module.{call.module}" if call.module else "",
        )
        for call in calls
    ]
    del wrapped[30]
    baseline, candidate = record(calls), record(wrapped)
    alignment = align(baseline, candidate, Options(strip_prefix="module"))
    assert_true_pairs(alignment, baseline, candidate)
    without = align(baseline, candidate)
    assert not any(baseline.entries[i].name.startswith("Module.blocks") for i, _ in without.pairs)


def test_a_wrapped_side_and_a_missing_call_pair_at_level_api_even_so() -> None:
    calls = transformer()
    wrapped = [call._replace(module=f"module.{call.module}" if call.module else "") for call in calls]
    del wrapped[30]
    baseline, candidate = record(calls), record(wrapped)
    assert_true_pairs(align(baseline, candidate), baseline, candidate)


def test_a_side_without_module_paths_pairs_by_the_order_of_its_ops() -> None:
    calls = transformer()
    baseline, candidate = record(calls), record([call._replace(module="") for call in calls[:20] + calls[21:]])
    assert_true_pairs(align(baseline, candidate), baseline, candidate)


def test_fuzzy_ignores_numbers_and_modules_and_reads_no_details() -> None:
    calls = transformer()
    other = [call._replace(module=f"{call.module}.renamed", signature="other") for call in calls]
    baseline, candidate = record(calls), record(other[1:20] + other[21:])
    alignment = align_calls(baseline.entries, candidate.entries, names_only, Options(fuzzy=True))
    assert_true_pairs(alignment, baseline, candidate)
    assert alignment.how == {"sequence": len(candidate.entries)}


def test_order_is_kept_where_numbers_do_not_settle_it() -> None:
    alignment = by_names(
        ["Tensor.add.0.forward", "Tensor.mul.0.forward", "Tensor.mul.1.forward"],
        ["Tensor.mul.0.forward", "Tensor.add.0.forward", "Tensor.add.1.forward", "Tensor.mul.1.forward"],
        modules=(["a", "b", "c"], ["x", "a", "y", "c"]),
    )
    assert (0, 1) in alignment.pairs
    assert (2, 3) in alignment.pairs


def test_too_many_differences_are_aligned_and_the_method_is_told() -> None:
    calls = transformer(Plan(layers=400, modules=False))
    chance = random.Random(3)
    baseline = record(calls, backward=False)
    candidate = record([call for call in calls if chance.random() > 0.3], backward=False)
    alignment = align(baseline, candidate)
    assert alignment.method != "exact"
    assert len(alignment.pairs) > 0.8 * len(candidate.entries)


@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_side_has_no_pairs(empty: int) -> None:
    sides = [record(transformer()), record(transformer())]
    sides[empty] = record([])
    alignment = align(sides[0], sides[1])
    assert alignment.pairs == []
    assert alignment.how == {}


@pytest.mark.parametrize(
    ("alignment", "message"),
    [
        (Alignment([(0, 0)], [], [], how={"name": 1}), r"1 positions for 2 calls of the baseline: .*in none \[1\]"),
        (Alignment([(0, 0), (1, 0)], [], [1], how={"name": 2}), r"candidate: in two buckets \[0\]"),
        (Alignment([(0, 0), (1, 1)], [1], [], how={"name": 2}), r"baseline: in two buckets \[1\]"),
        (Alignment([(0, 0), (1, 1)], [], [], how={"name": 1}), r"2 pairs, but"),
    ],
)
def test_self_check_tells_what_is_wrong(alignment: Alignment, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        alignment.self_check(2, 2)


def test_a_module_of_another_class_is_known_by_its_path() -> None:
    alignment = by_names(
        ["Module.norm.RMSNorm.forward.0", "Module.head.Linear.forward.0", "Module.Net.forward.0"],
        ["Module.norm.LlamaRMSNorm.forward.0", "Module.head.Linear.forward.0", "Module.LlamaNet.forward.0"],
    )
    assert alignment.pairs == [(0, 0), (1, 1), (2, 2)]
