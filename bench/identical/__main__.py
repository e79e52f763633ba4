"""Execute each program twice, compare the two runs, and print a table: `python -m bench.identical`.

The executions are two processes whose fresh memory is filled with different bytes, so that what nobody wrote differs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from tensorprobe.errors import TensorprobeError

SETTINGS = [("api", "tensor"), ("mix", "tensor"), ("module", "tensor"), ("aten", "tensor"), ("api", "summary")]
_FILLS = ("85", "180")


def folder_of(name: str, level: str, mode: str) -> str:
    """Return the name of the folder of one run."""
    return "".join(c if c.isalnum() else "-" for c in f"{name}-{level}-{mode}")


def execute(out: Path, names: Iterable[str], settings: Iterable[tuple[str, str]]) -> None:
    """Record each program with each of the settings into a folder of its own."""
    import torch

    from bench.identical.programs import RANKS

    torch.set_num_threads(1)
    for name, (level, mode) in itertools.product(names, settings):
        folder = out / folder_of(name, level, mode)
        if name in RANKS:
            _fork_ranks(folder, name, level, mode, RANKS[name])
        else:
            _record(folder, name, level, mode)


def _record(folder: Path, name: str, level: str, mode: str) -> None:
    import torch

    import tensorprobe
    from bench.identical.programs import PROGRAMS

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with tensorprobe.capture(folder, level=level, mode=mode, in_process=True, ring_bytes="8M") as probe:
                PROGRAMS[name](probe.step)
        except Exception as error:
            print(f"{name}, {level}: {type(error).__name__}: {error}", file=sys.stderr)


def _fork_ranks(folder: Path, name: str, level: str, mode: str, ranks: int) -> None:
    from torch import distributed

    folder.mkdir(parents=True)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                store = distributed.FileStore(f"{folder}.store", ranks)
                distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
                _record(folder, name, level, mode)
                distributed.destroy_process_group()
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            print(f"{name}, {level}: a rank ended with status {status}", file=sys.stderr)


def start_twice(
    out: Path, names: Iterable[str], settings: Iterable[tuple[str, str]], *, second: str = sys.executable
) -> list[subprocess.Popen[bytes]]:
    """Start two processes that execute the programs, with other bytes in fresh memory, into `out/0` and `out/1`.

    The Python of the second process may have another torch.
    """
    chosen = [f"--settings={level}:{mode}" for level, mode in settings]
    return [
        subprocess.Popen(
            [python, "-m", "bench.identical", "--execute", str(out / str(side)), *chosen, *names],
            env={**os.environ, "MALLOC_PERTURB_": fill, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            cwd=Path(__file__).parents[2],
        )
        for side, (fill, python) in enumerate(zip(_FILLS, (sys.executable, second), strict=True))
    ]


def verdict(out: Path, name: str, level: str, mode: str) -> str:
    """Return an empty text when the two runs agree, else what compare says."""
    import tensorprobe

    baseline, candidate = (out / side / folder_of(name, level, mode) for side in ("0", "1"))
    try:
        result = tensorprobe.compare(baseline, candidate)
    except TensorprobeError as error:
        return f"{type(error).__name__}: {error}"
    return "" if result else str(result).splitlines()[0]


def main() -> int:
    """Print which programs disagree with themselves."""
    parser = argparse.ArgumentParser(prog="python -m bench.identical")
    parser.add_argument("names", nargs="*", help="programs (default: all)")
    parser.add_argument("--execute", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", action="append", help="level:mode, e.g. aten:tensor; may be repeated")
    parser.add_argument("--python", default=sys.executable, help="Python of the second execution, with another torch")
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    arguments = parser.parse_args()
    chosen = [tuple(each.split(":")) for each in arguments.settings or ()] or SETTINGS
    from bench.identical.programs import PROGRAMS

    names = arguments.names or list(PROGRAMS)
    if arguments.execute:
        execute(arguments.execute, names, chosen)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        for process in start_twice(out, names, chosen, second=arguments.python):
            process.wait()
        print(f"{'program':55}" + "".join(f"{level}/{mode}".ljust(16) for level, mode in chosen))
        said = []
        for name in names:
            row = [verdict(out, name, level, mode) for level, mode in chosen]
            print(f"{name:55}" + "".join(("DIFFERS" if each else "agrees").ljust(16) for each in row), flush=True)
            said += [f"{name}, {level}/{mode}: {each}" for (level, mode), each in zip(chosen, row, strict=True) if each]
    print("\n".join(["", *said]))
    print(f"{len(names) * len(chosen) - len(said)} of {len(names) * len(chosen)} pairs agree.")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
