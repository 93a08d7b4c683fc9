"""Every registered op, by enumeration: opcheck, hostile arguments, a schema-driven fuzz of the raw ops."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

import halfbyte  # noqa: F401
from halfbyte.testing import SPECS, keywords_of, registered_ops

SAMPLES = [(name, i) for name, spec in SPECS.items() for i, _ in enumerate(spec.samples("cpu"))]
HOSTILE = [(name, i) for name, spec in SPECS.items() for i, _ in enumerate(spec.hostile("cpu"))]


def op(name: str):
    return getattr(torch.ops.halfbyte, name).default


def test_every_op_has_samples_and_every_sample_an_op() -> None:
    assert registered_ops() == sorted(SPECS)


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_opcheck(name: str, index: int) -> None:
    args = next(itertools.islice(SPECS[name].samples("cpu"), index, None))
    opcheck(op(name), tuple(args), keywords_of(args))  # pytree does not look into a Call


@pytest.mark.parametrize(("name", "index"), HOSTILE)
def test_hostile_arguments_raise_and_name_the_op(name: str, index: int) -> None:
    args, error, text = next(itertools.islice(SPECS[name].hostile("cpu"), index, None))
    with pytest.raises(error, match=text) as raised:
        op(name)(*args, **keywords_of(args))
    assert str(raised.value).startswith(f"halfbyte::{name}: ")


FUZZ = """
import random, sys, torch, halfbyte
from halfbyte.testing import SPECS, keywords_of
rng = random.Random(int(sys.argv[1])); torch.manual_seed(0)
INTS = [0, 1, -1, 2, 5, 32, 63, 64, 65, 100, 4096, 2**31, 2**40, 2**62, -2**63]
def tensor():
    shape = [rng.choice([0, 1, 2, 3, 48, 64, 80]) for _ in range(rng.randrange(4))]
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.int32])
    t = torch.randint(0, 255, shape).to(dtype)
    if t.dim() > 1 and rng.random() < 0.3: t = t.transpose(0, -1)
    if t.dim() and rng.random() < 0.2: t = t[::2]
    return t
def value(type):
    text = str(type)
    if text.startswith("Optional"): return None if rng.random() < 0.5 else value(type.getElementType())
    if text == "Tensor": return tensor()
    if text == "List[Tensor]": return [tensor() for _ in range(rng.randrange(3))]
    if text == "float": return rng.choice([0.0, 1e-3, -1.0, 0.9, 2.0, float("nan"), float("inf"), 1e300])
    if text == "bool": return rng.random() < 0.5
    return rng.choice(INTS)
for name, spec in sorted(SPECS.items()):
    op = getattr(torch.ops.halfbyte, name).default
    pool = list(spec.samples("cpu"))
    for _ in range(int(sys.argv[2])):
        types = [a.type for a in op._schema.arguments]
        sample = rng.choice(pool)
        args = [value(t) if rng.random() < 0.3 else a for a, t in zip(sample, types)]
        by_name = {a.name: a.type for a in op._schema.arguments}
        words = {k: value(by_name[k]) if rng.random() < 0.3 else v for k, v in keywords_of(sample).items()}
        for i, argument in enumerate(op._schema.arguments):
            if argument.name == "dtype" and not isinstance(args[i], torch.dtype):
                args[i] = rng.choice([torch.float32, torch.int8, torch.float64])
        try:
            with torch.no_grad(): op(*args, **words)
        except (ValueError, IndexError, RuntimeError, TypeError): pass
print("survived")
"""


@pytest.mark.parametrize("seed", range(3))
def test_fuzz_of_the_raw_ops_never_crashes(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(seed), "400"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "survived"


def pure_tensor_ops() -> list[str]:
    names = []
    for name in sorted(SPECS):
        schema = op(name)._schema
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments)
        if not writes and [str(result.type) for result in schema.returns] == ["Tensor"]:
            names.append(name)
    return names


@pytest.mark.parametrize("name", pure_tensor_ops())
def test_results_do_not_depend_on_strides(name: str) -> None:
    def strided(value):
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() == 0:
            return value
        wide = value.detach().repeat_interleave(2, dim=0)
        return wide[::2]

    for args in itertools.islice(SPECS[name].samples("cpu"), 0, None, 3):
        plain = [a.detach().contiguous() if isinstance(a, torch.Tensor) else a for a in args]
        expected = op(name)(*plain)
        actual = op(name)(*map(strided, plain))
        assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
