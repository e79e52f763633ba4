"""Replay scripts of hostile records: whatever a record says, the script is the fixed program, one literal and one expression."""

from __future__ import annotations

import ast
import json
import tokenize
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensorprobe.model import Call, Slot
from tensorprobe.replay import program
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.script import Results, Script, make_script

EVIL = [
    "coding: utf-7",
    "-*- coding: rot13 -*-",
    "\n# coding: utf-16\nimport os",
    '"""\nimport os; os.system("x")\n#',
    "'''\\",
    "'] or __import__('os').system('x') or t['",
    "\\",
    "\r\nimport os\r",
    "\x0cimport os",
    "\u2028import os\u2029",
    "\u202e\u2066txet\u2069",
    "\ud800\udfff",
    "\x00",
    "$device ${about} {0} %s",
    "ﬁnally",
    "class",
    "device",
]
TEXT = st.one_of(st.sampled_from(EVIL), st.text(max_size=20), st.text(st.characters(), max_size=5))
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.none(),
    st.just(float("nan")),
    st.just(float("inf")),
)


def _typed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    kinds = st.sampled_from(
        "torch.dtype torch.layout torch.memory_format torch.device float int ellipsis dict tuple torch.Size slice complex object".split()
    )
    value = st.one_of(inner, st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3), st.just("float32"))
    return st.one_of(
        st.lists(inner, max_size=3),
        st.fixed_dictionaries({"type": st.one_of(kinds, TEXT), "value": value}),
        st.fixed_dictionaries({"slot": st.one_of(TEXT, st.just("input.0"))}),
    )


TREES = st.recursive(st.one_of(NUMBERS, TEXT), _typed, max_leaves=8)
FIXED = ast.parse(Path(program.__file__).read_text()).body[1:]
"""The statements of the fixed program, without its docstring."""
NODES = (
    ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Subscript, ast.Name, ast.Load, ast.Call, ast.keyword, ast.Attribute,
    ast.UnaryOp, ast.USub,
)  # fmt: skip
FUNCTIONS = {"torch.nn.functional.softmax", "dtype", "float", "int", "slice", "complex", "torch.Size"}


def assert_expected_shape(script: Script) -> None:
    raw = script.text.encode("ascii")
    encoding, _ = tokenize.detect_encoding(BytesIO(raw).readline)
    assert encoding == "ascii" and b"\0" not in raw and b"\r" not in raw and b"\f" not in raw
    case, call, *rest = ast.parse(raw).body
    assert [ast.dump(node) for node in rest[:-1]] == [ast.dump(node) for node in FIXED]
    assert isinstance(case, ast.Assign) and ast.unparse(case.targets[0]) == "CASE"
    for node in ast.walk(case.value):
        assert isinstance(node, NODES), ast.dump(node)
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) == "float"
    assert isinstance(call, ast.FunctionDef) and call.name == "call" and len(call.body) == 1
    (made,) = call.body
    assert isinstance(made, ast.Return) and made.value is not None
    for node in ast.walk(made.value):
        assert isinstance(node, NODES), ast.dump(node)
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) in FUNCTIONS
        elif isinstance(node, ast.Subscript):
            assert ast.unparse(node.value) == "t" and isinstance(node.slice, ast.Constant)
        elif isinstance(node, ast.Name):
            assert node.id in ("torch", "t", "device", "dtype", "float", "int", "slice", "complex")
    assert ast.unparse(rest[-1]) == "if __name__ == '__main__':\n    raise SystemExit(main(CASE, call, __file__))"


@settings(max_examples=200, deadline=None)
@given(
    args=st.lists(TREES, max_size=3),
    kwargs=st.dictionaries(TEXT, TREES, max_size=3),
    slot=TEXT,
    device=TEXT,
    about=st.lists(TEXT, max_size=4),
    limit=st.floats(),
)
@example(args=[], kwargs={}, slot="a", device="cpu", about=["coding: utf-7", "# -*- coding: rot13 -*-"], limit=0.0)
@example(args=[], kwargs=dict.fromkeys(EVIL, "x"), slot="\n", device='"""', about=EVIL, limit=float("inf"))
def test_a_script_has_only_the_expected_shape(
    args: list[Any], kwargs: dict[str, Any], slot: str, device: str, about: list[str], limit: float
) -> None:
    held = Slot(name=slot, dtype="float32", shape=(2,), grad=True, device="cpu")
    call = Call(name="Functional.softmax.0.forward", args=args, kwargs=kwargs, slots=(held,))
    results = Results(limits={slot: {slot: limit}}, held={}, changed={slot: slot})
    try:
        script = make_script(call, {slot: torch.ones(2)}, {}, results, device=device, about=about)
    except CannotReplay:
        return
    assert_expected_shape(script)
    start = 8 + int.from_bytes(script.tensors[:8], "little")
    (stored,) = json.loads(script.tensors[8:start])
    assert stored.encode("utf-16", "surrogatepass") == slot.encode("utf-16", "surrogatepass")


@pytest.mark.parametrize("text", EVIL)
def test_a_file_name_stays_inside_the_folder(tmp_path: Path, text: str) -> None:
    for name in (text, f"../{text}", f"/etc/{text}", "." * 300):
        path = Script("pass", b"").write(tmp_path / "out", name)
        assert path.parent == tmp_path / "out" and path.name.isascii() and len(path.name) < 200
