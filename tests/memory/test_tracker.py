"""What kernels take during a call on CUDA, by the routes of csrc/cuda; devices other than the CPU stand for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte.formats import Format
from halfbyte.memory import cuda_kernels
from halfbyte.memory.tracker import _TEMPORARIES, StorageTracker

K, N = 256, 512


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "_device", lambda: (132, (9, 0)))


def tensors(tokens: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    packed = torch.empty(N, Format.parse("nf4").row_bytes(K), dtype=torch.uint8, device="meta")
    return torch.empty(tokens, columns, dtype=dtype, device="meta"), packed


@pytest.mark.parametrize(
    ("tokens", "dtype", "format", "expected"),
    [
        (257, torch.bfloat16, 0, N * K * 2),  # past 256 tokens the weight is decoded into a buffer
        (256, torch.bfloat16, 0, 0),  # 4 chunks of K: not worth splitting
        (1, torch.bfloat16, 4, N * K * 2),  # row formats always
        (1, torch.float32, 0, N * K * 4),  # float32 always
    ],
)
def test_linear_on_cuda(tokens: int, dtype: torch.dtype, format: int, expected: int) -> None:
    input, packed = tensors(tokens, K, dtype)
    assert _TEMPORARIES["halfbyte.linear.default"]((input, packed, None, format, 64, K)) == expected


def test_backward_and_lora_on_cuda() -> None:
    sums = 2 * 16 * K * 4  # 32 steps of 16 rows: two ranges, the sums of each in float32
    grad, packed = tensors(16, N, torch.bfloat16)
    assert _TEMPORARIES["halfbyte.linear_backward_input.default"]((grad, packed, 0, 64, K)) == sums
    lora = (grad, packed, None, None, 0, 64, K)
    assert _TEMPORARIES["halfbyte.lora_linear_backward_input.default"](lora) == sums
    for tokens in (17, 256):  # wgmma: 8 steps of 64 rows are one range
        grad, packed = tensors(tokens, N, torch.bfloat16)
        assert _TEMPORARIES["halfbyte.linear_backward_input.default"]((grad, packed, 0, 64, K)) == 0
    grad, packed = tensors(257, N, torch.bfloat16)
    assert _TEMPORARIES["halfbyte.linear_backward_input.default"]((grad, packed, 0, 64, K)) == N * K * 2
    lora = (grad, packed, None, None, 0, 64, K)
    assert _TEMPORARIES["halfbyte.lora_linear_backward_input.default"](lora) == N * K * 2
    input, packed = tensors(257, K, torch.bfloat16)
    low = torch.empty(4, K, dtype=torch.bfloat16, device="meta")
    lora = (input, packed, None, low, None, 1.0, [], 0, 64, K)
    assert _TEMPORARIES["halfbyte.lora_linear.default"](lora) == N * K * 2


def test_copies_of_an_adapters_operands_on_cuda() -> None:
    """bfloat16 activations by a float32 adapter: in float32; dropout: what is kept of the input, besides."""
    tokens, rows = 100, 4  # a weight small enough that the input's copies are the most
    shapes = (tokens, rows), (tokens, K), (rows, 1)
    grad, input, packed = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    down, projected = torch.empty(2, K, device="meta"), torch.empty(tokens, 2, device="meta")
    mask = torch.empty(tokens, K // 8, dtype=torch.uint8, device="meta")
    lora, adapter = (_TEMPORARIES[f"halfbyte.lora_linear{suffix}.default"] for suffix in ("", "_backward_adapter"))
    arguments = (input, packed, None, down, None, 1.0, [], 0, 64, K)
    assert lora(arguments) == lora((*arguments, None)) == tokens * K * 4
    assert lora((*arguments, mask)) == tokens * K * (4 + 2)
    for needs_A, expected in ((True, 4 + 2), (False, 0)):
        arguments = (grad, input, projected, None, None, 1.0, [], needs_A, True)
        assert adapter((*arguments, mask)) == tokens * rows * 4 + tokens * K * expected
    assert adapter((grad, input, projected.bfloat16(), None, None, 1.0, [], True, True)) == 0


def test_sums_of_splits_of_a_large_weight() -> None:
    """The temporary of linear at 128 tokens and 4096 x 14336, by its formula: splits * 128 * 4096 * 4."""
    packed = torch.empty(4096, Format.parse("nf4").row_bytes(14336), dtype=torch.uint8, device="meta")
    input = torch.empty(128, 14336, dtype=torch.bfloat16, device="meta")
    splits = cuda_kernels.wgmma_splits(4096, 14336, 132)
    assert splits == 4
    assert _TEMPORARIES["halfbyte.linear.default"]((input, packed, None, 0, 64, 14336)) == splits * 128 * 4096 * 4


@pytest.mark.parametrize(("device", "expected"), [("cpu", [12, 1040]), ("cuda", [512, 1536])])
def test_storages_on_cuda_are_blocks_of_512_bytes(device: str, expected: list[int]) -> None:
    """What `torch.cuda.memory_allocated` counts of them."""
    with FakeTensorMode(), StorageTracker(host=device == "cpu") as tracker:
        sizes = []
        for count in (3, 260):
            before = tracker.total
            kept = torch.empty(count, device=device)
            sizes.append(tracker.total - before)
            del kept
    assert sizes == expected
    assert tracker.peak == max(expected)


def test_host_memory_is_not_that_of_a_gpu() -> None:
    with FakeTensorMode(), StorageTracker(host=False) as tracker:
        kept = torch.empty(3, device="cuda"), torch.empty(1000)
    assert tracker.total == tracker.peak == 512
    del kept
