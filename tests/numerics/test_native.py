"""Which code serves, and that the native path imports neither numpy nor torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tensorprobe.numerics import native

SUMMARIZE = """
import struct, sys
from tensorprobe.model import DTYPES
from tensorprobe.numerics import native
from tensorprobe.numerics.summary import digest
from tensorprobe.numerics.summary import summarize_batch, summarize_buffer
content = struct.pack("<3f", 1, 2, 3)
assert summarize_buffer(content, DTYPES["float32"]).mean == 2.0
assert len(digest(content)) == 32 and summarize_batch([(0, 0, 0)])[0].nan == 0
print(native.describe(), "numpy" in sys.modules, "torch" in sys.modules, sep="|")
"""


def run_python(code: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout.strip()


def test_native_path_imports_neither_numpy_nor_torch() -> None:
    described, numpy, torch = run_python(SUMMARIZE, TENSORPROBE_NO_NATIVE="0").split("|")
    assert described.startswith("native (")
    assert (numpy, torch) == ("False", "False")


def test_the_environment_forces_the_twin() -> None:
    described, numpy, torch = run_python(SUMMARIZE, TENSORPROBE_NO_NATIVE="1").split("|")
    assert described == "numpy twin (TENSORPROBE_NO_NATIVE is set)"
    assert (numpy, torch) == ("True", "False")


@pytest.mark.parametrize(
    ("problem", "described"),
    [
        ("ModuleNotFoundError('no such module')", "numpy twin (extension not built)"),
        ("ImportError('undefined symbol: x')", "numpy twin (extension does not load: undefined symbol: x)"),
    ],
)
def test_an_extension_that_does_not_load_leaves_the_twin(problem: str, described: str) -> None:
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "tensorprobe.numerics._native":
            raise {problem}
sys.meta_path.insert(0, Refuse())
"""
    assert run_python(code + SUMMARIZE, TENSORPROBE_NO_NATIVE="").split("|")[0] == described


def test_kernel_is_the_implementation_where_it_is_built() -> None:
    assert native.kernel() is not None
    assert native.implementation() is native.kernel()
    assert native.describe() == f"native ({', '.join(native.kernel().features()) or 'portable'})"
