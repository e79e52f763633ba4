"""The rules of the house: who imports whom, who touches torch, how long things are, what `import tensorprobe` costs.

A rule is a function from a checkout (`src/tensorprobe` and `compat/*`) to a list of complaints. Each is shown to fail on
a planted checkout.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tensorprobe

HOUSE = Path(__file__).resolve().parents[1]
CORE = "src/tensorprobe"

BASE = {
    "fast",
    "errors",
    "model",
    "ops",
    "settings",
    "text",
    "files",
    "standard_json",
    "torch_names",
    "arguments",
    "registry",
    "packing",
    "npu_definitions",
}
STORED = BASE | {"numerics", "record"}
SEES_CALLS = STORED | {"judge", "report", "replay", "work"}
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "lazy": set(),
    "errors": set(),
    "registry": set(),
    "fast": {"numerics"},
    "model": {"errors"},
    "ops": {"errors", "model"},
    "settings": {"errors", "model"},
    "text": set(),
    "files": {"errors", "settings"},
    "standard_json": {"errors"},
    "packing": set(),
    "npu_definitions": set(),
    "torch_names": {"errors", "model"},
    "arguments": {"errors", "model", "ops", "torch_names", "fast"},
    "numerics": BASE,
    "record": BASE | {"numerics"},
    "work": BASE,
    "taps": STORED,
    "pairing": STORED,
    "judge": {"errors", "model", "ops", "settings", "text", "files", "standard_json"},
    "report": {"errors", "model", "text", "files", "standard_json", "packing"},
    "replay": STORED | {"judge", "report", "work"},
    "checks": SEES_CALLS,
    "watches": SEES_CALLS | {"taps"},
    "engine": SEES_CALLS | {"pairing"},
    "legacy": SEES_CALLS | {"taps", "pairing", "checks", "watches", "engine"},
    "sim": {"errors", "model", "files", "torch_names", "npu_definitions"},
    "api_accuracy_checker": {"legacy"},
    "ptdbg_ascend": {"legacy"},
    "msprobe": {"legacy"},
}
"""Room → the rooms it may import besides itself. `version` is open to all."""
OLD_NAMES = {"api_accuracy_checker", "ptdbg_ascend", "msprobe"}
FRONT_DOOR = "__init__"
ROOF = {"__main__", "cli", "inject", "integrations", "view"}
OPEN_TO_ALL = {"_fast", "lazy", "version"}
WITHOUT_TORCH = {
    "lazy",
    "version",
    "errors",
    "registry",
    "model",
    "ops",
    "settings",
    "text",
    "files",
    "standard_json",
    "packing",
    "judge",
    "report",
    "work",
    "pairing",
    "engine",
}
WITHOUT_NUMPY = WITHOUT_TORCH - {"packing", "judge", "pairing", "engine"}
"""Columns of measurements are numpy arrays. The rooms that work on them need numpy, but no tensors."""

INSTALLS = {"taps", "sim"}
"""The rooms that may install hooks, modes and patches."""
INSTALLING = re.compile(
    r"register_\w*(hook|prehook)|saved_tensors_hooks|push_(function|dispatch)_mode|at_end_of_backward|queue_callback"
)
MODES = {"TorchFunctionMode", "TorchDispatchMode", "DispatchMode"}
PRIVATE = re.compile(r"_(?!_)\w+")
RECENT = {
    "torch.accelerator",
    "torch.amp.GradScaler",
    "torch.compiler.is_compiling",
    "torch.get_autocast_dtype",
    "torch.get_device_module",
    "torch.Tensor.const_data_ptr",
}
"""Public names of torch, as `torch.…`, that the oldest supported version does not have. The simulated device needs a recent torch."""

MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 80
FORBIDDEN_FILE_NAMES = re.compile(r"(utils?|common|helpers?|managers?|misc|info|const(ants)?)\.py")
MODULE_NAME = re.compile(r"tensorprobe(\.(?!toml\b)\w+)+(:\w+)?")
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}

PUBLIC_NAMES = [
    "AuditResult",
    "CaptureIncomplete",
    "PrecheckResult",
    "Probe",
    "Result",
    "Run",
    "TensorprobeError",
    "__version__",
    "active_probe",
    "assert_runs_agree",
    "audit",
    "capture",
    "compare",
    "diff",
    "online",
    "open_run",
    "overflow",
    "precheck",
    "reference",
    "seed_all",
]


class File(NamedTuple):
    """One Python file of the house."""

    room: str
    path: Path
    tree: ast.Module
    package: list[str]
    """The package that relative imports start from."""

    @property
    def shown(self) -> str:
        """The path, relative to the checkout."""
        at = max(index for index, part in enumerate(self.path.parts) if part in ("src", "compat"))
        return "/".join(self.path.parts[at:])


def python_files(house: Path) -> Iterator[File]:
    """Yield each file of the house: those of tensorprobe and those under the old names."""
    for path in sorted((house / CORE).rglob("*.py")):
        inside = path.relative_to(house / CORE)
        room = inside.parts[0].removesuffix(".py")
        yield File(room, path, _parse(path.read_text("utf-8")), ["tensorprobe", *inside.parent.parts])
    for path in sorted((house / "compat").rglob("*.py")):
        inside = path.relative_to(house / "compat")
        if "build" not in inside.parts:
            yield File(inside.parts[0], path, _parse(path.read_text("utf-8")), list(inside.parent.parts))


_parse = functools.cache(ast.parse)


def imported_modules(file: File) -> Iterator[str]:
    """Yield every module a file imports, absolute, also inside functions, and each that a string of its own names."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, file.package)
            if base == "tensorprobe":
                yield from (f"{base}.{alias.name}" for alias in node.names)
            else:
                yield base
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
            yield node.value.partition(":")[0]


def _base(node: ast.ImportFrom, package: list[str]) -> str:
    base = node.module or ""
    if node.level:
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    return base


def check_arrows(house: Path) -> list[str]:
    """Find imports that the design does not allow, and rooms it does not know."""
    complaints = []
    for file in python_files(house):
        if file.room not in MAY_IMPORT and file.room not in ROOF and file.room != FRONT_DOOR:
            complaints.append(f"{file.path}: the design has no room {file.room!r}")
            continue
        for module in imported_modules(file):
            target = _room(module)
            known = target is None or target == file.room or target in OPEN_TO_ALL
            if not known and target not in _allowed(file.room):
                complaints.append(f"{file.path}: {file.room} imports {module}")
    return complaints


def _room(module: str) -> str | None:
    """The room that a module stands in; None for a module of somebody else."""
    first, *rest = module.split(".")
    if first in OLD_NAMES:
        return first
    if first != "tensorprobe":
        return None
    room = rest[0] if rest else FRONT_DOOR
    return FRONT_DOOR if room in PUBLIC_NAMES else room


def _allowed(room: str) -> set[str]:
    if room in ROOF:
        return {*MAY_IMPORT, FRONT_DOOR, *ROOF} - OLD_NAMES
    if room == FRONT_DOOR:
        return set(MAY_IMPORT) - OLD_NAMES
    return MAY_IMPORT[room] | ({FRONT_DOOR} if room in OLD_NAMES else set())


def check_torch_free(house: Path) -> list[str]:
    """Find imports of torch or numpy in rooms that do without."""
    return [
        f"{file.path}: {file.room} imports {module}"
        for file in python_files(house)
        for module in imported_modules(file)
        if (module.split(".")[0] == "torch" and file.room in WITHOUT_TORCH)
        or (module.split(".")[0] == "numpy" and file.room in WITHOUT_NUMPY and not _only_for_types(file.tree, module))
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


def check_hooks(house: Path) -> list[str]:
    """Find hooks, modes and patches that are installed outside taps and sim."""
    complaints = []
    for file in python_files(house):
        if file.room in INSTALLS or file.room == "torch_names":
            continue
        origins = _origins(file)
        for node in ast.walk(file.tree):
            what = _installs(node, origins)
            if what and not (file.room == "inject" and "meta_path" in what):
                complaints.append(f"{file.path}:{node.lineno}: {what}")  # type: ignore[attr-defined]
    return complaints


def _installs(node: ast.AST, origins: dict[str, str]) -> str | None:
    """What a piece of code installs in torch or in Python; None for any other code."""
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in ("setattr", "delattr") and ast.unparse(node.args[0]) != "self":
            return f"{called}({ast.unparse(node.args[0])}, …)"
        own = isinstance(node.func, ast.Name) and called not in origins
        last = origins.get(called, called).rpartition(".")[2]
        return last if INSTALLING.fullmatch(last) and not own else None
    if isinstance(node, ast.ClassDef):
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        return f"class {node.name} is a mode" if bases & MODES else None
    if isinstance(node, ast.Attribute) and node.attr == "meta_path":
        return "sys.meta_path"
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
        target = ast.unparse(node)
        root = origins.get(target.split(".")[0])
        own = root is None or _room(root) is not None or target.startswith("sys.modules[__name__]")
        return None if own else f"{target} is replaced"
    return None


def _origins(file: File) -> dict[str, str]:
    """Each name that a file imports, and what it stands for: `{"nn": "torch.nn", "F": "torch.nn.functional"}`."""
    found = {}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, file.package)
            found.update({alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names})
    return found


def check_private_names(house: Path) -> list[str]:
    """Find private and recent names of torch outside torch_names.py."""
    complaints = []
    for file in python_files(house):
        if file.room == "torch_names":
            continue
        lines = _private_lines(file)
        if lines:
            complaints.append(f"{file.path}: lines {lines} use private or recent names of torch")
    return complaints


def _private_lines(file: File) -> list[int]:
    """The lines that use a private or recent name of torch. Members of objects (`tensor._base`) are not seen."""
    origins = _origins(file)
    found = set()
    for node in ast.walk(file.tree):
        names = []
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", ast.unparse(node)):
            root, dot, rest = ast.unparse(node).partition(".")
            names = [f"{origins.get(root, root)}{dot}{rest}"] if root in origins else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{_base(node, file.package)}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "need" and node.args:
            names = [f"torch.{ast.literal_eval(node.args[0])}"] if isinstance(node.args[0], ast.Constant) else []
        for name in names:
            first, *rest = name.split(".")
            if first == "torch" and (
                name in (RECENT if file.room != "sim" else ()) or any(PRIVATE.fullmatch(part) for part in rest)
            ):
                found.add(node.lineno)  # type: ignore[attr-defined]
    return sorted(found)


def check_sizes(house: Path) -> list[str]:
    """Find files and functions that are too long, and file names that say nothing. The old names' files are given."""
    complaints = []
    for file in python_files(house):
        lines = len(file.path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_FILE_LINES:
            complaints.append(f"{file.path}: {lines} lines")
        if FORBIDDEN_FILE_NAMES.fullmatch(file.path.name) and file.room not in OLD_NAMES:
            complaints.append(f"{file.path}: a name that says nothing")
        for node in ast.walk(file.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    complaints.append(f"{file.path}: {node.name} has {length} lines")
    return complaints


def check_docstrings(house: Path) -> list[str]:
    """Find modules that do not say what they promise."""
    return [f"{file.path}: no docstring" for file in python_files(house) if not ast.get_docstring(file.tree)]


def check_pickles(house: Path) -> list[str]:
    """Find whatever could run code that stands in a file."""
    complaints = []
    for file in python_files(house):
        for module in imported_modules(file):
            if module.split(".")[0] in PICKLES:
                complaints.append(f"{file.path}: imports {module}")
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and _may_unpickle(node):
                complaints.append(f"{file.path}:{node.lineno}: may load a pickle")
    return complaints


def _may_unpickle(call: ast.Call) -> bool:
    given = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    if given.get("allow_pickle") is True:
        return True
    return ast.unparse(call.func) == "torch.load"


def check_twins(house: Path) -> list[str]:
    """Find uses of the numpy twins outside of themselves and of the module that chooses between them and the kernel."""
    complaints = []
    for file in python_files(house):
        if file.room == "numerics" and (file.path.name == "native.py" or file.path.name.startswith("twin")):
            continue
        modules = set(imported_modules(file))
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ImportFrom) and _base(node, file.package) == "tensorprobe.numerics":
                modules |= {f"tensorprobe.numerics.{alias.name}" for alias in node.names}
        found = sorted(module for module in modules if module.startswith("tensorprobe.numerics.twin"))
        complaints += [f"{file.path}: imports {module}" for module in found]
    return complaints


def check_sentences(house: Path) -> list[str]:
    """Find decisions that depend on the words of a sentence. A reason is a member of an enum, or a class of error."""
    complaints = []
    for file in python_files(house):
        for node in ast.walk(file.tree) if file.room != "sim" else ():  # the simulator answers to torch's own messages
            texts: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                texts = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".startswith", ".endswith")):
                texts = node.args
            if any(map(_is_sentence, texts)):
                complaints.append(f"{file.path}:{node.lineno}: compares a sentence")  # type: ignore[attr-defined]
    return complaints


def _is_sentence(node: ast.expr) -> bool:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [part.value if isinstance(part, ast.Constant) else "{}" for part in parts]
    text = "".join(map(str, texts)).strip()
    return " " in text and text.upper() != text


RULES: list[Callable[[Path], list[str]]] = [
    check_arrows,
    check_torch_free,
    check_hooks,
    check_private_names,
    check_sizes,
    check_docstrings,
    check_pickles,
    check_twins,
    check_sentences,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(HOUSE) == []


def test_the_rules_look_at_every_file() -> None:
    seen = {file.shown for file in python_files(HOUSE)}
    assert {f"{CORE}/errors.py", f"{CORE}/taps/probe.py", f"{CORE}/record/run.py"} <= seen
    assert {file.room for file in python_files(HOUSE)} >= OLD_NAMES
    assert all(any(imported_modules(file)) for file in python_files(HOUSE) if file.room == "taps")


def test_every_room_of_the_house_has_rules() -> None:
    rooms = {path.stem for path in (HOUSE / CORE).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"version", "fast"} <= {*MAY_IMPORT, *ROOF, FRONT_DOOR}


def lost_imports(house: Path) -> Iterator[str]:
    """Yield every import of a module or name that the checkout does not have, also in tests, benchmarks and examples."""
    for folder in (CORE, "compat", "tests", "bench", "examples", "tools"):
        for path in sorted((house / folder).rglob("*.py")):
            for node in ast.walk(_parse(path.read_text("utf-8"))):
                wanted: list[tuple[str, str]] = []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    wanted = [(node.module or "", alias.name) for alias in node.names]
                elif isinstance(node, ast.Import):
                    wanted = [(alias.name, "") for alias in node.names]
                elif isinstance(node, ast.Constant) and MODULE_NAME.fullmatch(str(node.value)) and folder == CORE:
                    wanted = [(node.value.partition(":")[0], node.value.partition(":")[2])]  # type: ignore[union-attr]
                yield from (f"{path}: {module} {name}" for module, name in wanted if not _is_there(house, module, name))


def _is_there(house: Path, module: str, name: str) -> bool:
    first, *rest = module.split(".")
    root = {"tensorprobe": "src", "bench": "", "tests": ""}.get(first, "compat" if first in OLD_NAMES else None)
    if root is None:
        return True
    at = (house / root / first).joinpath(*rest)
    file = at / "__init__.py" if at.is_dir() else at.with_suffix(".py")
    if not name or (not at.is_dir() and not file.exists()):  # a module in C has no names to look at
        return at.is_dir() or any(at.parent.glob(f"{at.name}.*"))
    listed = _names(file.read_text("utf-8")) if file.exists() else set()
    return name in listed or (at.is_dir() and _is_there(house, f"{module}.{name}", ""))


@functools.cache
def _names(text: str) -> set[str]:
    """Every name that a module may define, those that it loads lazily included."""
    found = set()
    for node in ast.walk(_parse(text)):
        found |= {getattr(node, "id", ""), getattr(node, "asname", None) or getattr(node, "name", "")}
        found |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    return found


def test_every_import_resolves(house: Path) -> None:
    assert list(lost_imports(HOUSE)) == []
    plant(house, "record/run.py", "def read(): ...")
    lines = ["from tensorprobe.record.run import read", "from tensorprobe.record.run import gone", "import bench.gone"]
    path = house / "tests/test_run.py"
    path.parent.mkdir()
    path.write_text("\n".join(lines))
    assert list(lost_imports(house)) == [f"{path}: tensorprobe.record.run gone", f"{path}: bench.gone "]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """An empty checkout."""
    return tmp_path


def plant(house: Path, file: str, text: str) -> Path:
    """Put one file into the room its path begins with."""
    path = house / ("compat" if file.partition("/")[0] in OLD_NAMES else CORE) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return path


MUTUAL = {frozenset({"fast", "numerics"})}
"""The loader of the C loops and the switch that turns C off."""
ARROWS = [
    (room, target)
    for room in sorted({*MAY_IMPORT, *ROOF} - OPEN_TO_ALL)
    for target in sorted(_allowed(room) - {room, FRONT_DOOR} - OPEN_TO_ALL)
    if {room, target} not in MUTUAL and not {room, target} <= ROOF
]


@pytest.mark.parametrize(("room", "target"), ARROWS, ids="-".join)
def test_a_reversed_arrow_is_found(room: str, target: str, house: Path) -> None:
    module = room if room in OLD_NAMES else f"tensorprobe.{room}"
    plant(house, f"{target}/bad.py", f"def late():\n    from {module} import something")
    assert len(check_arrows(house)) == 1


@pytest.mark.parametrize("room", sorted({*MAY_IMPORT} - OLD_NAMES - {"legacy"}))
def test_nothing_in_the_core_imports_the_older_tools(room: str, house: Path) -> None:
    plant(house, f"{room}/bad.py", "from tensorprobe.legacy import layouts\nimport ptdbg_ascend.dump")
    assert len(check_arrows(house)) == 2


PLANTED = [
    (check_arrows, "record/bad.py", "from tensorprobe.taps import capture"),
    (check_arrows, "taps/bad.py", "def late():\n    from tensorprobe import pairing"),
    (check_arrows, "taps/bad.py", "from ..judge import policy"),
    (check_arrows, "record/inner/bad.py", "from ...taps import probe"),
    (check_arrows, "taps/bad.py", "HOOK = 'tensorprobe.inject.capture:begin'"),
    (check_arrows, "model/bad.py", "import tensorprobe"),
    (check_arrows, "errors.py", "from tensorprobe.model import Call"),
    (check_arrows, "engine/bad.py", "from tensorprobe.cli.main import app"),
    (check_arrows, "__init__.py", "from tensorprobe.cli import main"),
    (check_arrows, "cellar/bad.py", "import json"),
    (check_arrows, "msprobe/bad.py", "from tensorprobe.cli import main"),
    (check_arrows, "msprobe/bad.py", "from ptdbg_ascend import dump"),
    (check_arrows, "cli/bad.py", "import msprobe"),
    (check_torch_free, "model/bad.py", "import torch"),
    (check_torch_free, "report/bad.py", "def late():\n    from numpy import array"),
    (check_torch_free, "judge/bad.py", "def late():\n    from torch import tensor"),
    (check_hooks, "watches/bad.py", "def f(node):\n    node.register_hook(f)"),
    (check_hooks, "watches/bad.py", "def f(module):\n    module.register_full_backward_pre_hook(f)"),
    (
        check_hooks,
        "replay/bad.py",
        "from torch.optim.optimizer import register_optimizer_step_post_hook as hook\nhook(print)",
    ),
    (check_hooks, "replay/bad.py", "from torch.autograd.graph import saved_tensors_hooks\nsaved_tensors_hooks(1, 2)"),
    (check_hooks, "legacy/bad.py", "from torch.overrides import TorchFunctionMode\nclass Tap(TorchFunctionMode): ..."),
    (
        check_hooks,
        "legacy/bad.py",
        "from torch.utils import _python_dispatch as d\nclass Tap(d.TorchDispatchMode): ...",
    ),
    (check_hooks, "engine/bad.py", "from tensorprobe import torch_names\ntorch_names.push_function_mode(1)"),
    (check_hooks, "checks/bad.py", "import torch\ntorch.nn.Module.__call__ = print"),
    (check_hooks, "checks/bad.py", "from torch import nn\nsetattr(nn.Module, '__call__', print)"),
    (check_hooks, "checks/bad.py", "def f(owner):\n    delattr(owner, 'forward')"),
    (check_hooks, "cli/bad.py", "import sys\nsys.meta_path.append(1)"),
    (check_hooks, "msprobe/bad.py", "import threading\nthreading.Thread.run = print"),
    (check_hooks, "ptdbg_ascend/bad.py", "def f(tensor):\n    tensor.register_hook(f)"),
    (check_private_names, "taps/bad.py", "import torch\ntorch._C._nn.gelu"),
    (check_private_names, "taps/bad.py", "from torch.utils import checkpoint as c\nc._CheckpointFrame"),
    (check_private_names, "sim/bad.py", "from torch.distributed.device_mesh import _mesh_resources"),
    (check_private_names, "replay/bad.py", "import torch._decomp"),
    (check_private_names, "watches/bad.py", "from tensorprobe import torch_names\ntorch_names.need('_C._len')"),
    (check_private_names, "ptdbg_ascend/bad.py", "import torch\ntorch._VF"),
    (check_sizes, "record/bad.py", "x = 1\n" * (MOST_FILE_LINES + 1)),
    (check_sizes, "record/bad.py", "def long():\n" + "    x = 1\n" * MOST_FUNCTION_LINES),
    (check_sizes, "msprobe/bad.py", "def long():\n" + "    x = 1\n" * MOST_FUNCTION_LINES),
    (check_sizes, "record/utils.py", "x = 1"),
    (check_docstrings, "record/bad.py", "x = 1"),
    (check_docstrings, "msprobe/bad.py", "x = 1"),
    (check_twins, "numerics/bad.py", "from tensorprobe.numerics.twin_blocks import fold"),
    (check_twins, "pairing/bad.py", "from tensorprobe.numerics import twin"),
    (check_pickles, "record/bad.py", "from pickle import load"),
    (check_pickles, "record/bad.py", "import torch\ntorch.load('x')"),
    (check_pickles, "record/bad.py", "import torch\ntorch.load('x', weights_only=True)"),
    (check_pickles, "record/bad.py", "import numpy\nnumpy.load('x', allow_pickle=True)"),
    (check_pickles, "msprobe/bad.py", "import torch\ntorch.load('x')"),
    (check_sentences, "judge/bad.py", "def f(note):\n    return 'was moved' in note"),
    (check_sentences, "checks/bad.py", "def f(error, name):\n    return f'device {name} is' not in str(error)"),
    (check_sentences, "legacy/bad.py", "def f(text):\n    return text.startswith('it must')"),
]


@pytest.mark.parametrize(("rule", "file", "text"), PLANTED)
def test_a_planted_fault_is_found(rule: Callable[[Path], list[str]], file: str, text: str, house: Path) -> None:
    path = plant(house, file, text)
    assert len(rule(house)) == 1
    assert str(path) in rule(house)[0]


SOUND = [
    ("record/good.py", "from tensorprobe.numerics.summary import digest\nfrom . import run"),
    ("pairing/good.py", "from tensorprobe.record import open_run"),
    ("cli/good.py", "import tensorprobe\nimport tensorprobe.taps\nHOOK = 'tensorprobe.inject.capture:begin'"),
    ("sim/good.py", "from tensorprobe.version import VERSION\nfrom tensorprobe.errors import NotFound"),
    ("record/inner/good.py", "import torch\nfrom ..run import Run"),
    (
        "msprobe/utils.py",
        "import tensorprobe\nfrom tensorprobe import open_run\nfrom tensorprobe.legacy import layouts",
    ),
    ("ptdbg_ascend/good.py", "def register_hook(model): ...\nregister_hook(1)"),
    ("taps/good.py", "from torch import nn\nnn.Module.__call__ = print\ndef f(node):\n    node.register_hook(f)"),
    (
        "checks/good.py",
        "import torch\nclass A:\n    def f(self):\n        self.x = torch.nn\n        setattr(self, 'y', 1)",
    ),
    ("torch_names.py", "import torch\nnode = torch._C._current_autograd_node"),
]


@pytest.mark.parametrize(("file", "text"), SOUND)
def test_what_is_allowed_is_not_complained_of(file: str, text: str, house: Path) -> None:
    plant(house, file, f'"""Planted."""\n{text}')
    assert [rule(house) for rule in RULES] == [[]] * len(RULES)


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


@pytest.mark.parametrize(("code", "most"), [("import tensorprobe", 100), (HELP, 260)], ids=START_UPS)
def test_start_up_imports_few_modules(code: str, most: int) -> None:
    """Modules are counted, not seconds: 64 and 220 now, nearly all of them Python's own, typer's and rich's."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; sys.stderr.write(str(len(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr) < most
