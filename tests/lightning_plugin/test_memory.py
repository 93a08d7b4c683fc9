"""The dense model never exists: peak anonymous memory of building inside the Trainer's two contexts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, re, threading, time
import lightning.pytorch as L, torch
from torch import nn
import halfbyte
from lightning_plugin import HalfbytePrecision

def anonymous(): return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

class Measured:
    def __enter__(self):
        self.base, self.peak, self.done = anonymous(), 0.0, False
        self.thread = threading.Thread(target=self.watch); self.thread.start()
    def watch(self):
        while not self.done:
            self.peak = max(self.peak, anonymous()); time.sleep(0.001)
    def __exit__(self, *_):
        self.done = True; self.thread.join()

def build(): return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(24)])

class Module(L.LightningModule):
    def configure_model(self):
        with measured: self.net = build()
    def predict_step(self, batch, index): return self.net(batch)

run = L.Trainer(plugins=HalfbytePrecision("nf4"), accelerator="cpu", logger=False, barebones=True)
for _ in range(2):  # the first layer of a process also brings in torch's own buffers
    halfbyte.nn.QuantLinear(2048, 2048)
torch.set_num_threads(1)  # nothing that a fork would lose
for place in ("configure_model", "init_module"):  # each in a process of its own: freed pages don't count
    if os.fork():
        os.wait()
        continue
    measured = Measured()
    if place == "configure_model":
        module = Module(); run.predict(module, [torch.zeros(1, 2048)])
    else:
        with run.init_module():
            with measured: module = build()
    report = halfbyte.report(module)
    print(place, measured.peak - measured.base, report.bytes / 2**20, report.dense_bytes / 2**20, flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_peak_of_building_in_configure_model_and_in_init_module() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # freed tensors leave at once, not when glibc likes
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["configure_model", "init_module"], done.stderr
    for place, *numbers in lines:
        peak, packed, dense = map(float, numbers)
        assert dense == 24 * 16
        assert packed == 24 * 2.25
        # Below: the layers the process drew first left buffers behind. Above: one layer is 16 MiB in fp32, its temporaries
        # as much.
        assert 0.4 * packed < peak < packed + 0.25 * (dense - packed), f"{place}: {peak:.0f} MiB"
        print(f"{place}: peak {peak:.1f} MiB, packed {packed:.1f}, dense {dense:.0f}")
