"""Makes `lightning_models` (and tests/distributed/ranks.py) importable here and in the processes that tests start."""

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The models are tiny."""


@pytest.fixture(autouse=True)
def _quiet_lightning():
    with warnings.catch_warnings():
        # Of the test loaders and of Lightning's own use of torch; our warnings are asserted where they matter.
        for text in (
            ".*does not have many workers.*",
            ".*`isinstance\\(treespec.*",
            ".*smaller than the logging interval.*",
        ):
            warnings.filterwarnings("ignore", text)
        yield
