"""Starts the processes of a distributed test, and what their scripts share."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300  # a machine that many share is several times slower


def run_ranks(
    script: Path, *arguments: str, world: int = 2, killed: int | None = None, timeout: float = TIMEOUT_S
) -> list[str]:
    """Runs `script` once per rank and returns what each printed. No process outlives the timeout.

    `killed` is the rank that is expected to kill or stop itself. The scripts can import what is in this folder and in
    tests/checkpoint.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(world),
        "NODE_RANK": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests/distributed", ROOT / "tests/checkpoint"))),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(script), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + timeout
    try:
        outputs = [""] * world
        for rank in sorted(range(world), key=lambda rank: rank == killed):
            if rank == killed:
                processes[rank].kill()
            outputs[rank] = processes[rank].communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    expected = [-9 if rank == killed else 0 for rank in range(world)]
    assert codes == expected, "\n".join(f"rank {rank}:\n{text[-3000:]}" for rank, text in enumerate(outputs))
    return outputs


@contextmanager
def gloo_group() -> Iterator[int]:
    """In a script: the process group of all ranks, which ends with them; gives this one's number."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # one rank: SCRIPT ARGUMENTS...
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the interpreter's own end: a group that a mesh or a module holds outlives its destruction, and one of its
    # threads that still has a tensor to let go of then aborts the process, in one of many hundred runs (pytorch#190489).
    os._exit(0)
