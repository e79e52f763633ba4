"""Tests that need the published msprobe, in an environment of its own: `make test-peer` makes it and runs them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "TENSORPROBE_PEER" in os.environ else ["test_*.py"]
