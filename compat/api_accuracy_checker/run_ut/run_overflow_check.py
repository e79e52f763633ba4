"""`run_overflow_check.py -forward F [-backward B]`: whether each overflow that was met in training is to be expected."""

import sys

from tensorprobe.legacy.checker.run_overflow_check import main

if __name__ == "__main__":
    sys.exit(main())
