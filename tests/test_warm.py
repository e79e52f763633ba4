"""A process that begins with torch in memory cannot tell: it sees, prints and ends as one with a start of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

FACTS = """\
import json, os, signal, sys, warnings
facts = {
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"), "folder": os.getcwd(),
    "environment": dict(os.environ), "torch": "torch" in sys.modules, "parent": os.getppid(), "input": sys.stdin.read(),
    "files": [fd for fd in range(3, 1000) if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)],
    "interrupt": str(signal.getsignal(signal.SIGINT)), "warnings": sys.warnoptions, "filters": len(warnings.filters) > 0,
    "own": sys.modules["sitecustomize"].OWN,
}
print(json.dumps(facts, indent=1))
"""
TORCH = """\
import sys
from torch.nn import functional
import torch
print(torch.__spec__.origin, torch.__file__, torch.__loader__.name, torch.nn.functional is functional, "torch" in sys.modules)
"""
ENDS = {
    "falls off its end": "print('done')",
    "exits with a code": "import sys; sys.exit(3)",
    "exits with words": "import sys; sys.exit('no licence')",
    "exits with nothing": "import sys; sys.exit()",
    "raises": "def f(): raise ValueError('of the user')\nf()",
    "is killed": "import os; print('last', flush=True); os.kill(os.getpid(), 9)",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "has something to do at its end": "import atexit; atexit.register(print, 'at the end'); print('before')",
    "has a thread": "import threading; threading.Timer(0.01, print, ['in a thread']).start()",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("OWN = 'was here'\n")
    return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": str(site), "MINE": "yes"}


def both(command: list[str], folder: Path, environment: dict[str, str]) -> list[tuple[int, str, str]]:
    """Exit code and output, with a start of its own and without."""
    cold = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    found = (cold, warm.run(command, cwd=folder, env=environment))
    return [(done.returncode, done.stdout, done.stderr) for done in found]


@pytest.mark.parametrize(
    "arguments",
    [["facts.py", "a", "--b"], ["-u", "-W", "error", "facts.py"], ["-c", FACTS, "a"], ["-m", "facts", "a"]],
    ids=["script", "options", "code", "module"],
)
def test_it_sees_the_same(arguments: list[str], tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    cold, as_it_begins = both([sys.executable, *arguments], tmp_path, environment)
    assert cold[0] == 0, cold
    assert as_it_begins == cold


def test_torch_looks_the_same(tmp_path: Path, environment: dict[str, str]) -> None:
    cold, as_it_begins = both([sys.executable, "-c", TORCH], tmp_path, environment)
    assert cold[0] == 0 and cold[1].endswith("torch True True\n"), cold
    assert as_it_begins == cold


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_in_the_same_way(code: str, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(code)
    cold, as_it_begins = both([sys.executable, "script.py"], tmp_path, environment)
    assert as_it_begins == cold


NESTED = """\
import os, subprocess, sys, torch
torch.ones(1, requires_grad=True).sum().backward()
print(os.getpid(), flush=True)
code = "import os, sys; print(os.getppid(), 'torch' in sys.modules); import torch; print(torch.is_grad_enabled())"
torch.set_grad_enabled(False)
subprocess.run([sys.executable, "-c", code], check=True)
os.execvpe(sys.executable, [sys.executable, "-c", "import os; print(os.getpid(), os.environ['MINE'])"], {"MINE": "other"})
"""


def test_what_it_starts_and_becomes_begins_afresh(tmp_path: Path, environment: dict[str, str]) -> None:
    done = warm.run([sys.executable, "-c", NESTED], cwd=tmp_path, env=environment)
    own, *rest = done.stdout.splitlines()
    assert rest == [f"{own} False", "True", f"{own} other"], done.stderr


def test_it_is_a_child_of_ours_with_the_files_it_is_given(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    code = f"import os, signal; os.write({writing}, str(os.getppid()).encode()); signal.pause()"
    process = warm.Popen([sys.executable, "-c", code], pass_fds=[writing])
    os.close(writing)
    assert os.read(reading, 20) == str(os.getpid()).encode()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert os.read(reading, 1) == b"", "somebody else holds the file"
    os.close(reading)
