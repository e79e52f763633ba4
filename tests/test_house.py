"""The rules of the house: who may import whom, how long things may be, what `import tensorprobe` may cost.

The rules are functions from a source tree to a list of complaints, so that each can be shown to fail on a planted tree.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tensorprobe

SOURCE = Path(__file__).resolve().parents[1] / "src" / "tensorprobe"

BASE = {"fast", "errors", "model", "ops", "settings", "text", "torch_names", "arguments", "registry"}
STORED = BASE | {"numerics", "record"}
SEES_CALLS = STORED | {"judge", "report", "replay", "work"}
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "registry": set(),
    "fast": {"numerics"},
    "model": {"errors"},
    "ops": {"errors", "model"},
    "settings": {"errors", "model"},
    "text": {"errors", "model"},
    "torch_names": {"errors", "model"},
    "arguments": {"errors", "model", "ops", "torch_names", "fast"},
    "numerics": BASE,
    "record": BASE | {"numerics"},
    "work": BASE,
    "taps": STORED,
    "pairing": STORED,
    "judge": {"errors", "model", "ops", "settings", "text"},
    "report": {"errors", "model", "text"},
    "replay": STORED | {"judge", "report", "work"},
    "checks": SEES_CALLS,
    "watches": SEES_CALLS | {"taps"},
    "engine": SEES_CALLS | {"pairing"},
    "legacy": SEES_CALLS | {"taps", "pairing", "checks", "watches", "engine"},
    "sim": {"errors", "model", "torch_names"},
}
"""Room → the rooms it may import besides itself. `version` is open to all."""
FRONT_DOOR = "__init__"
ROOF = {"__main__", "cli", "inject", "integrations"}
OPEN_TO_ALL = {"_fast", "version"}
WITHOUT_TORCH = {
    "version",
    "errors",
    "registry",
    "model",
    "ops",
    "settings",
    "text",
    "judge",
    "report",
    "work",
    "pairing",
    "engine",
}
WITHOUT_NUMPY = WITHOUT_TORCH - {"judge", "pairing", "engine"}
"""Columns of measurements are numpy arrays; the rooms that work on them need it, and no tensor."""
DEBT = {
    ("record", "legacy"),
    ("replay", "checks"),
    ("replay", "taps"),
    ("taps", "legacy"),
    ("work", "engine"),
}
"""Arrows that are still to be turned: room → room."""

MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 80
FORBIDDEN_FILE_NAMES = re.compile(r"(utils?|common|helpers?|managers?|misc|info|const(ants)?)\.py")
MODULE_NAME = re.compile(r"tensorprobe(\.\w+)+(:\w+)?")
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}

PUBLIC_NAMES = [
    "CaptureIncomplete",
    "PrecheckResult",
    "Probe",
    "Result",
    "Run",
    "TensorprobeError",
    "__version__",
    "active_probe",
    "capture",
    "compare",
    "online",
    "open_run",
    "overflow",
    "precheck",
    "seed_all",
]


def python_files(source: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """Each file with its room and its syntax tree."""
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source)
        yield inside.parts[0].removesuffix(".py"), path, _parse(path.read_text(encoding="utf-8"))


_parse = functools.cache(ast.parse)


def imported_modules(path: Path, tree: ast.Module, source: Path) -> Iterator[str]:
    """Every module that a file imports, absolute, also inside functions, and those it names in a string of their own."""
    package = ["tensorprobe", *path.relative_to(source).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            if base == "tensorprobe":
                yield from (f"{base}.{alias.name}" for alias in node.names)
            else:
                yield base
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
            yield node.value.partition(":")[0]


def check_arrows(source: Path) -> list[str]:
    """Imports that the design does not allow, and rooms it does not know."""
    complaints = []
    for room, path, tree in python_files(source):
        if room not in MAY_IMPORT and room not in ROOF and room != FRONT_DOOR:
            complaints.append(f"{path}: the design has no room {room!r}")
            continue
        for module in imported_modules(path, tree, source):
            parts = module.split(".")
            if parts[0] != "tensorprobe":
                continue
            target = parts[1] if len(parts) > 1 else FRONT_DOOR
            if target == room or target in OPEN_TO_ALL:
                continue
            if (room, target) in DEBT:
                continue
            if target not in _allowed(room):
                complaints.append(f"{path}: {room} imports {module}")
    return complaints


def _allowed(room: str) -> set[str]:
    if room in ROOF:
        return {*MAY_IMPORT, FRONT_DOOR, *ROOF}
    return set(MAY_IMPORT) if room == FRONT_DOOR else MAY_IMPORT[room]


def check_torch_free(source: Path) -> list[str]:
    """Imports of torch or numpy in rooms that do without."""
    return [
        f"{path}: {room} imports {module}"
        for room, path, tree in python_files(source)
        for module in imported_modules(path, tree, source)
        if (module.split(".")[0] == "torch" and room in WITHOUT_TORCH)
        or (module.split(".")[0] == "numpy" and room in WITHOUT_NUMPY and not _only_for_types(tree, module))
    ]


def _only_for_types(tree: ast.Module, module: str) -> bool:
    """Whether a module is imported under `if TYPE_CHECKING` and nowhere else."""
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and any(alias.name == module for alias in node.names)
    ]
    guarded = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in node.body
    ]
    return bool(imports) and all(node in guarded for node in imports)


def check_sizes(source: Path) -> list[str]:
    """Files and functions that are too long, and names that say nothing."""
    complaints = []
    for _, path, tree in python_files(source):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_FILE_LINES:
            complaints.append(f"{path}: {lines} lines")
        if FORBIDDEN_FILE_NAMES.fullmatch(path.name):
            complaints.append(f"{path}: a name that says nothing")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    complaints.append(f"{path}: {node.name} has {length} lines")
    return complaints


def check_docstrings(source: Path) -> list[str]:
    """Modules that do not say what they promise."""
    return [f"{path}: no docstring" for _, path, tree in python_files(source) if not ast.get_docstring(tree)]


def check_pickles(source: Path) -> list[str]:
    """Whatever could run code that stands in a file."""
    complaints = []
    for _, path, tree in python_files(source):
        for module in imported_modules(path, tree, source):
            if module.split(".")[0] in PICKLES:
                complaints.append(f"{path}: imports {module}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _may_unpickle(node):
                complaints.append(f"{path}:{node.lineno}: may load a pickle")
    return complaints


def _may_unpickle(call: ast.Call) -> bool:
    given = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    if given.get("allow_pickle") is True:
        return True
    return ast.unparse(call.func) == "torch.load" and given.get("weights_only") is not True


RULES: list[Callable[[Path], list[str]]] = [
    check_arrows,
    check_torch_free,
    check_sizes,
    check_docstrings,
    check_pickles,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(SOURCE) == []


def test_the_rules_look_at_every_file() -> None:
    seen = {path for _, path, _ in python_files(SOURCE)}
    assert {SOURCE / "errors.py", SOURCE / "taps" / "probe.py", SOURCE / "record" / "run.py"} <= seen
    assert all(any(imported_modules(path, tree, SOURCE)) for room, path, tree in python_files(SOURCE) if room == "taps")


PLANTED = [
    (check_arrows, "record/bad.py", "from tensorprobe.taps import capture"),
    (check_arrows, "pairing/bad.py", "import tensorprobe.taps.probe"),
    (check_arrows, "taps/bad.py", "from tensorprobe.pairing import align"),
    (check_arrows, "taps/bad.py", "def late():\n    from tensorprobe import pairing"),
    (check_arrows, "taps/bad.py", "from ..judge import policy"),
    (check_arrows, "record/inner/bad.py", "from ...taps import probe"),
    (check_arrows, "engine/bad.py", "from tensorprobe.legacy import layouts"),
    (check_arrows, "judge/bad.py", "from tensorprobe.record import open_run"),
    (check_arrows, "report/bad.py", "from tensorprobe.settings import LEVELS"),
    (check_arrows, "sim/bad.py", "from tensorprobe.record import open_run"),
    (check_arrows, "taps/bad.py", "HOOK = 'tensorprobe.inject.capture:begin'"),
    (check_arrows, "model/bad.py", "import tensorprobe"),
    (check_arrows, "errors.py", "from tensorprobe.model import Call"),
    (check_arrows, "engine/bad.py", "from tensorprobe.cli.main import app"),
    (check_arrows, "__init__.py", "from tensorprobe.cli import main"),
    (check_arrows, "cellar/bad.py", "import json"),
    (check_torch_free, "model/bad.py", "import torch"),
    (check_torch_free, "report/bad.py", "def late():\n    from numpy import array"),
    (check_torch_free, "judge/bad.py", "def late():\n    from torch import tensor"),
    (check_sizes, "record/bad.py", "x = 1\n" * (MOST_FILE_LINES + 1)),
    (check_sizes, "record/bad.py", "def long():\n" + "    x = 1\n" * MOST_FUNCTION_LINES),
    (check_sizes, "record/utils.py", "x = 1"),
    (check_docstrings, "record/bad.py", "x = 1"),
    (check_pickles, "record/bad.py", "from pickle import load"),
    (check_pickles, "record/bad.py", "import torch\ntorch.load('x')"),
    (check_pickles, "record/bad.py", "import torch\ntorch.load('x', weights_only=False)"),
    (check_pickles, "record/bad.py", "import numpy\nnumpy.load('x', allow_pickle=True)"),
]


@pytest.mark.parametrize(("rule", "file", "text"), PLANTED)
def test_a_planted_fault_is_found(rule: Callable[[Path], list[str]], file: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    assert len(rule(tmp_path)) == 1
    assert str(path) in rule(tmp_path)[0]


SOUND = [
    (
        "record/good.py",
        "from tensorprobe.numerics.digest import digest\nfrom . import run",
    ),
    ("pairing/good.py", "from tensorprobe.record import open_run"),
    ("cli/good.py", "import tensorprobe\nimport tensorprobe.taps\nHOOK = 'tensorprobe.inject.capture:begin'"),
    ("sim/good.py", "from tensorprobe.version import VERSION\nfrom tensorprobe.errors import NotFound"),
    ("record/inner/good.py", "import torch\nfrom ..run import Run\ntorch.load('x', weights_only=True)"),
]


@pytest.mark.parametrize(("file", "text"), SOUND)
def test_what_is_allowed_is_not_complained_of(file: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""Planted."""\n{text}\n')
    assert [rule(tmp_path) for rule in RULES] == [[]] * len(RULES)


def test_public_names_are_these() -> None:
    assert sorted(tensorprobe.__all__) == PUBLIC_NAMES
    assert all(getattr(tensorprobe, name) is not None for name in PUBLIC_NAMES)
    assert set(PUBLIC_NAMES) <= set(dir(tensorprobe))
    with pytest.raises(AttributeError, match="no attribute 'compere'"):
        tensorprobe.compere  # noqa: B018


SHOW_HEAVY_MODULES = "import sys; sys.stderr.write(' '.join(sorted({'torch', 'numpy'} & set(sys.modules))) or 'none')"
HELP = "import sys; sys.argv[1:] = ['--help']; from tensorprobe.cli.main import app; app(standalone_mode=False)"
START_UPS = {"import": "import tensorprobe", "help": HELP}


@pytest.mark.parametrize("code", START_UPS.values(), ids=START_UPS)
def test_start_up_imports_neither_torch_nor_numpy(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{SHOW_HEAVY_MODULES}"], capture_output=True, text=True, check=True
    )
    assert done.stderr == "none"


@pytest.mark.parametrize(("code", "most"), [("import tensorprobe", 100), (HELP, 450)], ids=START_UPS)
def test_start_up_imports_few_modules(code: str, most: int) -> None:
    """Modules are counted, not seconds: 64 and 390 now, nearly all of them Python's own, typer's and rich's."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; sys.stderr.write(str(len(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr) < most
