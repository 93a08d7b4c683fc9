"""Makes `checkpoints` importable here; a dense checkpoint to load."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    from checkpoints import write_dense

    return write_dense(tmp_path / "dense")
