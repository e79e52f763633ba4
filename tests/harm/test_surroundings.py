"""What surrounds a program: its descriptors, children, signals and limits are its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensorprobe
from tests.harm.programs import run_both
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
