"""Runs many commands of the published peer in processes that begin with its packages in memory: importing them costs seconds.

    .venv-peer/bin/python bench/peer/forks.py

In: a line of JSON for each command, `[FOLDER, SCRIPT, ARGUMENT, ...]`; SCRIPT is a path, or `msprobe` for its own command.
Out: a line of JSON for each, `[EXIT CODE, OUTPUT]`. Ends with its input.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from typing import BinaryIO


def run(folder: str, script: str, *arguments: str) -> None:
    os.chdir(folder)
    sys.argv = [script, *arguments]
    if script == "msprobe":
        importlib.import_module("msprobe.msprobe").main()
    else:
        runpy.run_path(script, run_name="__main__")


def begin(command: list[str], output: BinaryIO) -> None:
    """In a new process: the command, to its end."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    code = 0
    try:
        run(*command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # the tool writes what is left of a dump there
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the packages print when they are imported
    for package in ("msprobe.pytorch", "msprobe.msprobe", "torch._dynamo"):
        importlib.import_module(package)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            process = os.fork()
            if process == 0:
                begin(json.loads(line), output)
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            output.seek(0)
            answer = [code, output.read().decode(errors="replace")]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
