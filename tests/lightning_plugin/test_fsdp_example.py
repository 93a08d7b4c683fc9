"""examples/fsdp_finetune.py under torchrun on two ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_strategies_of_the_example_reach_the_same_loss() -> None:
    losses = []
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        command += [str(ROOT / "examples/fsdp_finetune.py"), "--strategy", strategy]
        command += ["--accelerator", "cpu", "--devices", "2", "--steps", "3"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PL_GLOBAL_SEED": "1",  # of the sampler
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append(float(re.search(rf"{strategy}: loss ([\d.]+) after 3 steps", done.stdout).group(1)))
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-3)
