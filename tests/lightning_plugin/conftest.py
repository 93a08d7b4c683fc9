"""Makes `lightning_models` (and tests/distributed/ranks.py) importable here and in the processes that tests start."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture(autouse=True)
def _one_thread():
    # The models are tiny: a second thread only waits for the first, and long where other processes keep it off its core.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
