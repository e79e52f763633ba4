"""Python runs this at start-up in processes that tensorprobe starts. It then runs the sitecustomize that it shadows."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)


def _run_the_next_one():
    """Run another sitecustomize on the path as if we were not there."""
    others = [path for path in sys.path if str(Path(path or ".").absolute()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch_for_torch():
    try:
        from tensorprobe.inject.on_import import install
    except ImportError as error:
        sys.stderr.write(f"tensorprobe: not loaded into this process ({error})\n")
    else:
        install()


_run_the_next_one()
_watch_for_torch()
