"""What surrounds a program: its descriptors, children, signals and limits are its own."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

import tensorprobe
from tests.harm.programs import SCRIPT, run_both
from tests.taps.scripts import run_python, write_script

BODIES = {
    "closes every descriptor and opens files": """
        with watch():
            print(train())
            os.closerange(3, 70_000)
            files = [open(f"file{number}", "wb") for number in range(50)]
            print(train())
        for file in files:
            file.close()
        print(train())
    """,
    "has closed its standard streams": """
        mine = os.dup(1)
        for number in (0, 1, 2):
            os.close(number)
        with watch():
            losses = train()
        os.write(mine, repr(losses).encode())
    """,
    "waits for any child": """
        with watch():
            train()
            child = os.fork()
            if child == 0:
                os._exit(6)
            print(os.wait()[0] == child)
            try:
                print(os.waitpid(-1, os.WNOHANG))
            except ChildProcessError:
                print("no other child")
    """,
    "handles SIGCHLD": """
        calls = []
        signal.signal(signal.SIGCHLD, lambda *_: calls.append(1))
        with watch():
            train()
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        print(len(calls))
    """,
    "has lost a child while the capture began": """
        calls = []
        def count(*_):
            calls.append(1)
        signal.signal(signal.SIGCHLD, count)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with watch():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            train()
        print(len(calls) > 0, os.waitpid(child, 0)[0] == child)
    """,
    "shows a warning once for each line": """
        warnings.simplefilter("default")
        for module in model:
            module.register_full_backward_hook(lambda *_: None)
        with watch():
            print(train(1))
            print(model(torch.ones(1, 4)).tanh().sin().cos().atan().sum().item())
            print(train())
    """,
    "warns in a process that it forks": """
        warnings.simplefilter("always")
        with watch():
            train()
            child = os.fork()
            if child == 0:
                float(model(torch.ones(1, 4)).sum())
                os._exit(0)
            print(os.waitpid(child, 0)[1])
    """,
    "has hooks for the modules of all programs": """
        from torch.nn.modules import module as modules
        seen = []
        modules.register_module_forward_pre_hook(lambda module, given: seen.append(type(module).__name__))
        modules.register_module_forward_hook(lambda module, given, result: seen.append(type(module).__name__))
        modules.register_module_full_backward_hook(lambda module, *_: seen.append(type(module).__name__))
        modules.register_module_parameter_registration_hook(lambda *_: seen.append("parameter"))
        with watch():
            train(1)
        print(seen)
    """,
    "has replaced the backward of tensors": """
        backward = torch.Tensor.backward
        seen = []
        def mine(self, *args, **kwargs):
            seen.append(self.item())
            return backward(self, *args, **kwargs)
        torch.Tensor.backward = mine
        with watch():
            train()
        print(seen)
    """,
    "limits the size of files": """
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        with watch():
            print(train())
        print(resource.getrlimit(resource.RLIMIT_FSIZE))
    """,
    "limits the size of files for good, and ends inside": """
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        block = watch()
        block.__enter__()
        print(train())
    """,
    "limits its descriptors": """
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, 1024))
        with watch():
            print(train())
    """,
    "replaces functions of os and time": """
        import builtins
        train()
        def refuse(*_, **__):
            raise OSError("replaced")
        saved = os.write, os.open, os.read, builtins.open, os.getpid, time.sleep, time.monotonic
        with watch():
            os.write = os.open = os.read = builtins.open = time.sleep = refuse
            os.getpid, time.monotonic = (lambda: 1), (lambda: 0.0)
            losses = train()
            os.write, os.open, os.read, builtins.open, os.getpid, time.sleep, time.monotonic = saved
        print(losses)
    """,
}


FROM_OUTSIDE = {
    "has deleted its folder": """
        os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
        print(train())
    """,
    "has emptied sys.path": """
        sys.path[:] = []
        print(train())
    """,
    "closes every descriptor and opens files, under overflow": """
        print(train())
        os.closerange(3, 70_000)
        files = [open(f"file{number}", "w") for number in range(50)]
        print(train(), torch.ones(1).sin().cos().tan())
        for file in files:
            file.write("mine")
            file.close()
    """,
    "has a wrapper around modules": """
        calls, torchs = [], nn.Module.__call__
        def counted(self, *args, **kwargs):
            calls.append(type(self).__name__)
            return torchs(self, *args, **kwargs)
        nn.Module.__call__ = counted
        print(train(), calls)
    """,
}


@pytest.mark.parametrize("command", ["capture", "overflow", "online"])
@pytest.mark.parametrize("body", FROM_OUTSIDE.values(), ids=FROM_OUTSIDE)
def test_program_is_unharmed_from_outside_that(body: str, command: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    script.write_text(script.read_text() + textwrap.dedent(body))
    alone, watched = (
        _outcome([*words, script, "alone"], tmp_path / name)
        for name, words in (
            ("plain", []),
            ("watched", ["-m", "tensorprobe", command, "-o", tmp_path / "out", "--", sys.executable]),
        )
    )
    assert watched[0].startswith(alone[0])
    assert watched[1] == alone[1]


def _outcome(words: list[str | Path], cwd: Path) -> tuple[str, dict[str, str]]:
    cwd.mkdir()
    done = run_python(words, cwd, code=None)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, {path.name: path.read_text() for path in cwd.glob("file*")}


def test_recording_begins_with_the_next_module_when_the_first_is_interrupted(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import sys, torch
        model = torch.nn.Linear(2, 2)
        struck = []
        def hook(frame, event, arg):
            if event == "call" and frame.f_code.co_name == "start" and frame.f_code.co_filename.endswith("taps/probe.py"):
                struck.append(frame)
                raise TimeoutError
        sys.settrace(hook)
        try:
            model(torch.ones(2))
        except TimeoutError:
            print("interrupted")
        sys.settrace(None)
        model(torch.ones(2))
        """,
    )
    command = ["-m", "tensorprobe", "capture", "-o", tmp_path / "run", "--", sys.executable, script]
    assert run_python(command, tmp_path).stdout == "interrupted\n"
    assert [call.op for call in tensorprobe.open_run(tmp_path / "run").calls()] == ["Functional.linear"]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_program_is_unharmed_that(body: str, tmp_path: Path) -> None:
    run_both(body, tmp_path)


def test_run_is_closed_and_complete_where_the_program_left_it_alone(tmp_path: Path) -> None:
    for number, name in enumerate(("waits for any child", "has closed its standard streams", "limits its descriptors")):
        folder = tmp_path / str(number)
        run_both(BODIES[name], folder)
        run = tensorprobe.open_run(folder / "watched" / "run")
        assert run.closed
        assert run.coverage[0].failed == 0


def test_run_is_complete_where_the_program_has_files_named_like_modules_of_python(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch, tensorprobe
        with tensorprobe.capture("run"):
            torch.add(torch.ones(2), 1)
        """,
    )
    for name in ("enum", "select", "types", "dataclasses", "json", "mmap"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the program')\n")
    text = script.read_text()
    script.write_text(
        f"import sys; folder = sys.path.pop(0)\nimport torch, tensorprobe.taps.probe\nsys.path.insert(0, folder)\n{text}"
    )
    run_python([script], tmp_path)
    assert [call.op for call in tensorprobe.open_run(tmp_path / "run").calls()][-1] == "Torch.add"
