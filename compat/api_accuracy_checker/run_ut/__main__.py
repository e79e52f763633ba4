"""`python -m api_accuracy_checker.run_ut -forward F -backward B`: the command `run_ut.py`, wherever it is installed."""

import sys

from tensorprobe.legacy.checker.run_ut import main

if __name__ == "__main__":
    sys.exit(main())
