"""The user's map: what it may say, and the message for each thing it may not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tensorprobe.errors import SettingsError
from tensorprobe.pairing.align import Options
from tensorprobe.pairing.mapping import parse_mapping, read_map_text

from .call_sequences import by_names


def test_lines_and_json_say_the_same(tmp_path: Path) -> None:
    lines = "# known pairs\n\nFunctional.silu = NPU.npu_silu  # fused\nTensor.add.0\tTorch.add.3\n"
    from_json = parse_mapping('{"Functional.silu": "NPU.npu_silu", "Tensor.add.0": "Torch.add.3"}')
    (tmp_path / "map.txt").write_text(lines, encoding="utf-8")
    assert parse_mapping(lines) == from_json == parse_mapping(read_map_text(tmp_path / "map.txt"))
    assert from_json.ops == {"NPU.npu_silu": "Functional.silu"}
    assert [str(name) for name in from_json.calls[0]] == ["Tensor.add.0", "Torch.add.3"]


def test_the_longest_beginning_decides() -> None:
    mapping = parse_mapping("Module.blocks = Module.layers\nModule.special = Module.layers.3")
    assert mapping.rename_op("Module.layers.2.Linear") == "Module.blocks.2.Linear"
    assert mapping.rename_op("Module.layers.3.Linear") == "Module.special.Linear"
    assert mapping.rename_op("Module.layers2.Linear") == "Module.layers2.Linear"
    assert mapping.rename_module("layers.2") == "blocks.2"
    assert mapping.rename_module("head") == "head"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Functional.silu", r"map, line 1: expected two names.*got 1"),
        ("\na b c", r"map, line 2: .*got 3"),
        ("Functonal.silu = NPU.npu_silu", r"map, line 1: 'Functonal.silu' is not.*Did you mean 'Functional'\?"),
        (
            "silu = NPU.npu_silu",
            r"map, line 1: 'silu' is not the name of a call or an op. Names start with Functional,",
        ),
        ("Tensor.add.0 = Torch.add", r"line 1: 'Tensor.add.0' is one call, 'Torch.add' is every call"),
        ("Tensor.add = Torch.add.0", r"line 1: 'Torch.add.0' is one call, 'Tensor.add' is every call"),
        (
            "Tensor.add.0.forward = Torch.add.0",
            r"line 1: .*same direction in both names, got 'forward' and 'no direction'",
        ),
        ("Tensor.add.0 Torch.add.0\nTensor.add.0 Torch.add.1", r"line 2: baseline name 'Tensor.add.0' .*map, line 1"),
        ("Tensor.add Torch.add\nTensor.sub Torch.add", r"line 2: candidate name 'Torch.add' already has a partner"),
        (
            '{"Tensor.add": "Torch.add", "Tensor.add": "Torch.sub"}',
            r"baseline name 'Tensor.add' already has a partner",
        ),
        ('{"Tensor.add": 3}', r"map, 'Tensor.add': expected a string as the candidate's name, got 3"),
        ('{"Tensor.add": ', r"map starts with '{' but is not a JSON object: .*line 1"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_mapping(text)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"map file '.*' does not exist"):
        read_map_text(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="cannot read map file"):
        read_map_text(tmp_path / "binary")


def test_a_mapped_op_pairs_all_its_calls() -> None:
    alignment = by_names(
        ["Functional.silu.0.forward", "Functional.silu.1.forward", "Functional.silu.1.backward"],
        ["NPU.npu_silu.0.forward", "NPU.npu_silu.1.forward", "NPU.npu_silu.1.backward"],
        Options(mapping=parse_mapping("Functional.silu = NPU.npu_silu")),
    )
    assert alignment.pairs == [(0, 0), (1, 1), (2, 2)]
    assert alignment.how == {"map": 3}
    assert alignment.unused_map == []


def test_a_mapped_op_joins_one_that_the_candidate_also_has() -> None:
    alignment = by_names(
        ["Functional.silu.0.forward", "Functional.silu.1.forward", "Functional.silu.1.backward"],
        ["Functional.silu.0.forward", "NPU.npu_silu.0.forward", "NPU.npu_silu.0.backward"],
        Options(mapping=parse_mapping("Functional.silu = NPU.npu_silu")),
    )
    assert alignment.pairs == [(0, 0), (1, 1), (2, 2)]
    assert alignment.how == {"name": 1, "map": 2}


def test_a_mapped_call_takes_its_backward_along_and_leaves_the_rest() -> None:
    alignment = by_names(
        ["Tensor.add.0.forward", "Tensor.add.1.forward", "Tensor.add.1.backward"],
        ["Torch.add.5.forward", "Tensor.add.0.forward", "Torch.add.5.backward"],
        Options(mapping=parse_mapping("Tensor.add.1.forward = Torch.add.5.forward")),
    )
    assert alignment.pairs == [(0, 1), (1, 0), (2, 2)]
    assert alignment.how == {"name": 1, "map": 2}


def test_a_mapped_call_is_found_as_it_is_spelled_in_the_run() -> None:
    names = ["Tensor.add.0.forward", "Tensor.__add__.0.forward"]
    mapping = parse_mapping("Tensor.__add__.0 = Tensor.mul.0")
    alignment = by_names(names, ["Tensor.mul.0.forward"], Options(mapping=mapping))
    assert alignment.pairs == [(1, 0)]


def test_a_mapped_module_renames_paths_too() -> None:
    alignment = by_names(
        ["Tensor.add.0.forward", "Tensor.add.1.forward"],
        ["Tensor.add.0.forward"],
        Options(mapping=parse_mapping("Module.blocks = Module.layers")),
        modules=(["blocks.0", "blocks.1"], ["layers.1"]),
    )
    assert alignment.pairs == [(1, 0)]
    assert alignment.unused_map == []


def test_what_the_map_names_in_vain_is_told() -> None:
    mapping = parse_mapping("Functional.silu = NPU.npu_silu\nTensor.add.7 = Tensor.add.8")
    alignment = by_names(["Tensor.add.0.forward"], ["Tensor.add.0.forward"], Options(mapping=mapping))
    assert alignment.pairs == [(0, 0)]
    assert alignment.unused_map == ["Functional.silu = NPU.npu_silu", "Tensor.add.7 = Tensor.add.8"]


def test_globs_and_regular_expressions_rename_what_they_match() -> None:
    mapping = parse_mapping(
        r"""
        Module.h.*.attn      = Module.layers.*.self_attn
        Module.h             = Module.layers
        Module.**.out        = Module.wrapped.**.final
        Module.stage\2.\1    = re:Module\.(\w+)_(\d+)(?:\.body)?
        Tensor.add_?         = NPU.plus_?
        """
    )
    renamed = {
        "Module.layers.11.self_attn.q.Linear": "Module.h.11.attn.q.Linear",
        "Module.layers.1.mlp.Linear": "Module.h.1.mlp.Linear",
        "Module.wrapped.a.b.final.Linear": "Module.a.b.out.Linear",
        "Module.conv_2.body.1.Conv2d": "Module.stage2.conv.1.Conv2d",
        "NPU.plus_7": "Tensor.add_7",
        "NPU.plus_77": "NPU.plus_77",
        "Module.layers2.self_attn": "Module.layers2.self_attn",
    }
    assert {name: mapping.rename_op(name) for name in renamed} == renamed
    assert mapping.rename_module("layers.3.self_attn") == "h.3.attn"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Module.a.* = Module.b", r"line 1: expected the same wildcards in both names, got \* and none"),
        ("Module.a.* = Module.b.**", r"same wildcards in both names, got \* and \*\*"),
        ("Modul.a.* = Module.b.*", r"'Modul.a.' is not the name of a call or an op. Did you mean 'Module'"),
        (r"Module.\2 = re:Module\.(\w+)", r"has \\2, but .* has 1 groups"),
        (r"re:Module\.(\w+) = Module.a", r"line 1: the regular expression is the candidate's name, on the right"),
        (r"Module.a = re:Module\.(\w", r"is no pattern that can be read: a '\)' is missing"),
        (r"Module.a = re:Module\.(?P<x>a)", r"supported as '\(\?:' only"),
        (r"Module.a = re:Module\.a{2}", r"'{' at character 10 is not supported there"),
        ("Module.a = re:" + "a" * 501, r"it has 501 characters; at most 500"),
        ("Module.a.* = Module.b.*\nModule.c.* = Module.b.*", r"line 2: candidate name 'Module.b.\*' already has"),
    ],
)
def test_what_is_wrong_with_a_pattern_is_said(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_mapping(text)


def test_no_pattern_takes_more_than_linear_time() -> None:
    mapping = parse_mapping("Module.x = re:Module.((a*)*|(a|a)*)*b\nModule.*a*a*a*a*a*a*a*b = Module.y*a*a*a*a*a*a*a*b")
    started = time.process_time()
    assert mapping.rule_for("Module." + "a" * 4000) is None
    assert mapping.rule_for("Module.y" + "a" * 4000) is None
    assert time.process_time() - started < 5
