"""Runs PEFT's own tests of quantized layers with their loaders swapped for halfbyte's, and counts them.

    pip download --no-binary :all: --no-deps peft==0.21.2
    python tests/upstream/peft_suite.py peft-0.21.2.tar.gz [--json FILE]

The tests are those of the source distribution, unpacked into a temporary folder; nothing of them is in this repository.
`test_quantization.py` (method x backend) gets halfbyte loaders for its backends, and LoRA, rsLoRA and DoRA as further
methods; custom-module dispatch is `TestDynamicDispatch` as it stands, with our patch of PEFT active. The model is a random
OPT of 12 layers made here: no hub is asked. PEFT's tests on GPUs are not run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LOADERS = '''
"""Stands in for QUANTIZATION_BACKENDS of PEFT's test_quantization.py."""
import os
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from peft_bridge import HalfbyteConfig
from peft_bridge.backend import HalfbyteBackend

MODEL = os.environ["HALFBYTE_PEFT_MODEL"]


@dataclass
class Loader:
    name: str
    backend_cls = HalfbyteBackend
    supports_merge = True
    supports_non_quantized_comparison = True
    model_id = MODEL
    expected_layer_count = 24

    def load_model(self):
        config = HalfbyteConfig(self.name)
        return AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=config, device_map={"": "cpu"})


LOADERS = [Loader("nf4"), Loader("int8")]
'''

MORE_METHODS = """
from peft import LoraConfig

TEST_CASES += [
    (LoraConfig, {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    (LoraConfig, {"r": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    (LoraConfig, {"r": 8, "target_modules": ["q_proj", "v_proj"], "use_dora": True}),
]
"""

PARTS = {
    # PEFT's LoRA layers have no `quantization_backend`: what asks for that attribute stays with the methods that do.
    "method x backend (nf4, int8), LoRA and DoRA": ["tests/test_quantization.py", "-k", "not (backend_is_set and lora)"],
    "custom-module dispatch": ["tests/test_custom_models.py", "-k", "TestDynamicDispatch"],
}


def swap_loaders(tests: Path) -> None:
    """Edits the temporary copies of PEFT's tests: our backends, LoRA among the methods, the model made here.

    Raises:
        SystemExit: the file no longer has the lines that are replaced.
    """
    (tests / "halfbyte_loaders.py").write_text(LOADERS)
    source = (tests / "test_quantization.py").read_text()
    block = re.compile(r"^QUANTIZATION_BACKENDS = \[\]\n(if is_\w+\(\):\n(    .*\n)+)+", re.MULTILINE)
    ours = "from .halfbyte_loaders import LOADERS as QUANTIZATION_BACKENDS\n"
    source, backends = block.subn(ours, source)
    source, methods = re.subn(r"^def _peft_id\(", MORE_METHODS + "\n\ndef _peft_id(", source, count=1, flags=re.MULTILINE)
    if (backends, methods) != (1, 1):
        raise SystemExit("test_quantization.py of this PEFT has another form: QUANTIZATION_BACKENDS or _peft_id moved")
    (tests / "test_quantization.py").write_text(source)
    custom = tests / "test_custom_models.py"  # one test of the dispatch asks the hub for a small OPT
    custom.write_text(custom.read_text().replace('"peft-internal-testing/opt-125m"', 'os.environ["HALFBYTE_PEFT_MODEL"]'))


def make_model(folder: Path) -> None:
    """A random OPT with 12 layers, as PEFT's counts expect."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256, "num_attention_heads": 4, "vocab_size": 512}
    OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=12, max_position_embeddings=64)).save_pretrained(folder)


def run(part: list[str], where: Path, environment: dict[str, str]) -> list[dict[str, str]]:
    """Runs one part; returns name, outcome and reason of each test."""
    report = where / "report.xml"
    # transformers warns of what this PEFT calls, and its configuration makes errors of that.
    arguments = [*part, "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "addopts=", "-o", "filterwarnings="]
    # Imported before collection, so that PEFT is patched as it is for users.
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "peft_bridge", *arguments], cwd=where, env=environment, check=False
    )
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else {"skipped": "skipped"}.get(problem.tag, "failed")
        reason = "" if problem is None else (problem.get("message") or "").splitlines()[0][:200]
        found.append({"test": case.get("name") or "", "outcome": outcome, "reason": reason})
    return found


def save(results: dict[str, list[dict[str, str]]], sdist: str, path: Path | None) -> None:
    """Prints counts and reasons; writes them as a benchmark's result if asked."""
    counts = {name: Counter(case["outcome"] for case in cases) for name, cases in results.items()}
    rest = [[case["test"], case["outcome"], case["reason"]] for cases in results.values() for case in cases]
    rest = [row for row in rest if row[1] != "passed"]
    for name, found in counts.items():
        print(f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in sorted(found.items()))}")
    for test, outcome, reason in rest:
        print(f"    {outcome}: {test}: {reason}")
    if path is not None:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        harness = importlib.import_module("harness")
        where = harness.environment()
        where["versions"].update({name: importlib.metadata.version(name) for name in ("peft", "transformers")})
        columns, kinds = ["tests", "passed", "failed", "skipped"], ("passed", "failed", "skipped")
        tables = [
            {
                "title": f"Tests of {sdist} with the loaders of its quantization backends swapped for halfbyte's. LoRA is "
                "added to its methods, without 6 cases that read an attribute which PEFT's LoRA layers don't have.",
                "columns": columns,
                "rows": [[name, *(found[kind] for kind in kinds)] for name, found in counts.items()],
            },
            {"title": "What did not pass, and why.", "columns": ["test", "outcome", "reason"], "rows": rest},
        ]
        content = {"benchmark": "peft-suite", "environment": where, "tables": [t for t in tables if t["rows"]]}
        path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path, help="peft-X.Y.Z.tar.gz, of the installed version")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(args.sdist) as archive:
            filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # there since Python 3.11.4
            archive.extractall(temporary, **filters)
        where = next(Path(temporary).glob("peft-*"))
        (where / "src").rename(where / "src-unused")  # the installed package is what is tested
        (where / "tests/__init__.py").touch()
        if importlib.util.find_spec("diffusers") is None:  # imported by PEFT's shared code, used by none of these tests
            (where / "diffusers.py").write_text("class StableDiffusionPipeline: ...\n")
        swap_loaders(where / "tests")
        make_model(where / "model")
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "HALFBYTE_PEFT_MODEL": str(where / "model"),
        }
        results = {name: run(part, where, environment) for name, part in PARTS.items()}
    save(results, args.sdist.name, args.json)


if __name__ == "__main__":
    main()
