"""`msprobe parse`: the tensors of a dump as single files, `.npy` or `.pt`; or one such file in the other form.

In: a dump, a run, or a `.pt` or `.npy` file. Out: files in the output folder; nothing that exists is overwritten, no
pickle is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tensorprobe.errors import SettingsError, TensorDamaged
from tensorprobe.legacy.compared.arguments import demand_output
from tensorprobe.legacy.layouts.pt import read_pt_file
from tensorprobe.legacy.msprobe.cli_options import Options
from tensorprobe.record import export_run, open_run
from tensorprobe.record.elements import to_torch
from tensorprobe.record.export import save_tensor
from tensorprobe.text import counted, plain

_FORMS = ("npy", "pt")


def parse(command: str, arguments: Sequence[str]) -> int:
    """Write the files and say how many."""
    options = Options(command, "The tensors of a dump as files.")
    options.add_argument("-d", "--dump_path", metavar="PATH", help="a dump, a run, or one .pt or .npy file")
    options.add_argument("-t", "--type", default="pt", choices=_FORMS, help="form of the files (pt)")
    options.add_argument("-o", "--output_path", default="./output", metavar="FOLDER", help="for the files (./output)")
    given = options.read(arguments)
    if given.dump_path is None:
        raise SettingsError(
            "-d is missing: the dump to take tensors from. (The shell that 'msprobe parse' once opened is not here: "
            "tensorprobe inspect DUMP [CALL]   looks into a dump.)"
        )
    source, target = Path(given.dump_path), Path(given.output_path)
    if source.suffix in (".pt", ".npy") and source.is_file():
        said = str(_convert(source, target, given.type))
    else:
        said = _export(source, target, given.type)
    sys.stdout.write(f"{said}\n")
    return 0


def _export(source: Path, target: Path, form: Literal["npy", "pt"]) -> str:
    """Every tensor of a dump."""
    done = export_run(open_run(source), target, to=form)
    left = "".join(f"; {count:,} left out: {reason}" for reason, count in done.left_out.items())
    damaged = f"; {counted(done.damaged_lines, 'line')} cannot be read" if done.damaged_lines else ""
    return f"{plain(done.folder)}: {counted(done.tensors, 'tensor')}{left}{damaged}"


def _convert(source: Path, target: Path, form: str) -> Path:
    """One file in the other form; numpy has no bfloat16 and no float8, they become float32."""
    import numpy
    import torch

    try:
        if source.suffix == ".npy":
            held = torch.from_numpy(numpy.load(source, allow_pickle=False))
        else:
            held = to_torch(*read_pt_file(source.resolve()))
    except (TensorDamaged, OSError, ValueError, TypeError, EOFError) as error:
        raise SettingsError(f"'{plain(source)}' cannot be read: {error}") from None
    if form == "npy":
        narrow = held.is_floating_point() and held.dtype not in (torch.float16, torch.float32, torch.float64)
        held = (held.float() if narrow else held).detach().numpy()
    path = demand_output(target, create=True) / f"{source.stem}.{form}"
    try:
        with path.open("xb") as file:
            save_tensor(held, file)
    except FileExistsError:
        raise SettingsError(f"'{plain(path)}' exists; nothing is overwritten. Choose another folder with -o.") from None
    return path
