"""`run_ut.py -forward F -backward B`: each recorded call alone, on the device and on the CPU in higher precision."""

import sys

from tensorprobe.legacy.checker.run_ut import main

if __name__ == "__main__":
    sys.exit(main())
