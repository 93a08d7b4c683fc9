"""Lets these tests import two_ranks, and what tests/distributed has for starting it."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
