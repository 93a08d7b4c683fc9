"""Makes `sharded_models`, `ranks` and the checkpoint of tests/checkpoint importable here."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "checkpoint")]
