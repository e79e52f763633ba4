"""Python processes that begin with torch in memory: importing it, and what its first optimizer imports, costs four seconds each.

`Popen` is subprocess.Popen. A command `python [-u] [-W …] (script | -c code | -m module) …` with the Python of the tests, or a program
of its environment that is written in Python, is forked from a process that has imported torch and done nothing else; any other is
started as ever. The new process is a child of the caller with the environment, folder, files, arguments, `sys.path`, sitecustomize
and `__main__` of a fresh one. Torch is in `sys.modules` when the program has imported it, not before. What it starts by
subprocess.Popen, or becomes by os.execvpe, begins in the same way.

Not for tests of what Python does at its start and end: modules are not torn down, and frames of this file lie below the program's.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import fcntl
import importlib
import importlib.machinery
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

_LARGEST = 1 << 20
_SET_CHILD_SUBREAPER = 36
_PLAIN = subprocess.Popen


class _Order(NamedTuple):
    """A process that is to be, and the numbers that its files are to have."""

    program: list[str]
    """What Python is told to run, without its options."""
    warnings: list[str]
    folder: str
    environment: dict[str, str]
    files: list[int]
    new_session: bool


class Popen(_PLAIN):  # type: ignore[type-arg]
    def _execute_child(  # type: ignore[override]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Sequence[int], cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: int,
        start_new_session: bool, *process_group: Any,
    ) -> None:  # fmt: skip
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        environment = dict(os.environ if env is None else env)
        read = None if executable or preexec_fn or shell or not close_fds else _read_command(args, environment)
        if read is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *pipes,
                restore_signals, gid, gids, uid, umask, start_new_session, *process_group,
            )  # fmt: skip
            return
        given = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        folder = str(Path(cwd or ".").absolute())
        order = _Order(*read, folder, environment, [0, 1, 2, *pass_fds], start_new_session)
        self.pid = _begin(order, [*given, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(command: Sequence[str | Path], *, timeout_s: float = 120, **settings: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run of a command that reads nothing, with what it printed as text."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(list(map(str, command)), text=True, **{**streams, **settings}) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _read_command(args: Any, environment: Mapping[str, str]) -> tuple[list[str], list[str]] | None:
    """What Python is to run and the warnings it is given, if the command is one of ours."""
    if isinstance(args, (str, bytes)):
        return None
    program, *rest = [os.fsdecode(arg) for arg in args]
    if program != sys.executable:
        found, here = shutil.which(program, path=environment.get("PATH")), Path(sys.executable).parent
        if found is None or Path(found).parent != here:
            return None
        if not Path(found).name.startswith("python"):
            return ([found, *rest], []) if Path(found).read_bytes().startswith(b"#!%b/" % os.fsencode(here)) else None
    options = []
    while rest[:1] in (["-u"], ["-W"]):
        if rest.pop(0) == "-W":
            options.append(rest.pop(0))
    return (rest, options) if rest and (rest[0] in ("-c", "-m") or not rest[0].startswith("-")) else None


# Each process has a server of its own, which is a child of it and is asked for all others.

_server: socket.socket | None = None


def _begin(order: _Order, files: Sequence[int]) -> int:
    """Begin a process; its number. The server orphans it, and we are for this moment the one who adopts orphans."""
    server = _start_server() if _server is None else _server
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(server, [json.dumps(order).encode()], list(files))
        return int(server.recv(32))
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, 0)


def _connection() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
    return ours, theirs


def _start_server() -> socket.socket:
    """That of the tests, which imports torch. It ends when nobody holds the other end any more."""
    global _server
    _server, theirs = _connection()
    with theirs:
        process = _PLAIN(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    atexit.register(process.wait)
    atexit.register(_server.close)
    return _server


# In the server, and in what is forked from it.


def _serve(connection: socket.socket) -> tuple[_Order, list[int]]:
    """Fork for every order. Comes back in each new process, and never here."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, _LARGEST, 64)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            orphaning = os.getpid()
            number = os.fork()
            if number == 0:
                while os.getppid() == orphaning:  # until then the program would see another parent
                    os.sched_yield()
                return _Order(*json.loads(message)), files
            os.write(writing, str(number).encode())
            os._exit(0)
        number = int(os.read(reading, 32))
        os.waitpid(between, 0)
        for fd in (reading, writing, *files):
            os.close(fd)
        connection.send(str(number).encode())


def _keep_files(numbers: Sequence[int], files: Sequence[int], more: int) -> socket.socket:
    """Give our files these numbers and close all others, but one more, a socket, which gets a number of its own."""
    above = max(numbers) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in (more, *files)]
    for number, fd in zip(numbers, copies[1:], strict=True):
        os.dup2(fd, number)
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {*numbers, copies[0]}:  # noqa: PTH208
        try:
            os.close(fd)
        except OSError:  # that of the listing itself
            continue
    return socket.socket(fileno=copies[0])


class _Torch:
    """Torch as it was imported, put into `sys.modules` when the program imports it."""

    def __init__(self) -> None:
        self._modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
        self._spec = self._modules["torch"].__spec__
        self._finders = list(sys.meta_path)

    def hide(self) -> None:
        for name in self._modules:
            sys.modules.pop(name, None)
        sys.meta_path[:] = [self, *self._finders]  # type: ignore[list-item]

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = copy.copy(self._spec)
        assert spec is not None
        spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        sys.modules.update(self._modules)


def _become(order: _Order, torch: _Torch, base: Sequence[str]) -> Callable[[], object]:
    """Make this process look like a fresh one. The program of the order is returned."""
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    torch.hide()
    sys.path[:] = [*filter(None, order.environment.get("PYTHONPATH", "").split(":")), *base]
    sys.modules.pop("sitecustomize", None)
    if importlib.machinery.PathFinder.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    sys.warnoptions[:] = order.warnings
    warnings._processoptions(order.warnings)  # type: ignore[attr-defined]
    kind, *rest = order.program
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if kind == "-m":
        sys.path.insert(0, order.folder)
        sys.argv[:] = rest
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *rest[1:]]
        return lambda: exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    script = Path(kind).absolute()
    sys.path.insert(0, str(script.parent))
    sys.argv[:] = [kind, *rest]
    main.__file__ = str(script)
    return lambda: exec(compile(script.read_bytes(), script, "exec", dont_inherit=True), main.__dict__)


def _run(program: Callable[[], object]) -> NoReturn:
    """Run the program to the end of this process. There may be frames of another one below, of which nothing is run any more."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _main(connection: socket.socket) -> NoReturn:
    global _server
    base = sys.path[1:]
    importlib.import_module("torch._dynamo")  # an older one imports setuptools, which adds to sys.path
    torch = _Torch()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # those of torch undo its registrations one by one
    while True:
        order, files = _serve(connection)
        connection.detach()  # the files are closed by their numbers below
        ours, theirs = (each.detach() for each in _connection())
        if os.fork() != 0:
            break
        nothing = os.open(os.devnull, os.O_RDWR)
        connection = _keep_files([0, 1, 2], [nothing] * 3, theirs)
    _server = _keep_files(order.files, files, ours)
    if order.new_session:
        os.setsid()

    def execute(file: str, args: Sequence[str], env: Mapping[str, str]) -> None:
        read = _read_command(args, env)
        if read is None:
            execvpe(file, args, env)
        else:
            _run(_become(_Order(*read, str(Path.cwd()), dict(env), [], False), torch, base))

    execvpe, os.execvpe = os.execvpe, execute  # type: ignore[assignment]
    subprocess.Popen = Popen  # type: ignore[misc]
    _run(_become(order, torch, base))


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
