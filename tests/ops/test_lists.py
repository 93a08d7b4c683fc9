"""quantize_list and dequantize_list against the reference, and the model-wide callers that batch with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte
from halfbyte import ops, reference
from halfbyte.nn import batches
from halfbyte.nn.linear import QuantLinear, quantize_linears_
from halfbyte.testing import ALL_FORMATS

SHAPES = [(3, 64), (1, 1), (40, 65), (0, 64), (2, 4304), (300, 8), (2, 3, 100)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made[2][5, 3], made[4][1, 7] = float("nan"), float("inf")
    made[5][:7] = 0.0
    made.append(torch.randn(64, 9, generator=generator).t())  # strided
    return [x.to(dtype) for x in made]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("format", ALL_FORMATS, ids=str)
def test_lists_equal_the_reference(format: halfbyte.Format, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in DTYPES:
            x = inputs(dtype)
            packed = ops.quantize_list(x, format)
            for got, expected in zip(packed, reference.quantize_list(x, format), strict=True):
                assert torch.equal(got, expected)
            columns = [t.shape[-1] for t in x]
            values = ops.dequantize_list(packed, format, columns, dtype)
            for got, expected in zip(values, reference.dequantize_list(packed, format, columns, dtype), strict=True):
                assert got.dtype == dtype
                assert got.is_contiguous()
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(before)


def test_a_list_past_the_caches_streams_to_the_same_values() -> None:
    """Together they are more than what bypasses the caches, each is less."""
    x = [torch.randn(2048, 1031, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    packed = ops.quantize_list(x, "nf4")
    for got, rows in zip(ops.dequantize_list(packed, "nf4", [1031] * 3), packed, strict=True):
        assert torch.equal(got, ops.dequantize(rows, "nf4", 1031))


def test_outputs_share_no_memory() -> None:
    rows = ops.quantize(torch.randn(2, 64), "nf4")
    one, two = ops.dequantize_list([rows, rows], "nf4", [64, 64])
    one.zero_()
    assert two.any()


def test_an_empty_list_is_an_empty_list() -> None:
    assert ops.quantize_list([], "nf4") == []
    assert ops.dequantize_list([], "nf4", []) == []
    with pytest.raises(TypeError, match="dtype must be"):
        ops.dequantize_list([], "nf4", [], torch.float64)


def test_wrappers_name_the_entry() -> None:
    good: Any = torch.ones(2, 64)
    with pytest.raises(TypeError, match=r"quantize_list: tensors\[1\] must be a float32, .* tensor, got int64"):
        ops.quantize_list([good, good.long()], "nf4")
    with pytest.raises(TypeError, match=r"dequantize_list: packed\[1\] must be a uint8 tensor, got list"):
        ops.dequantize_list([ops.quantize(good, "nf4"), []], "nf4", [64, 64])  # type: ignore[list-item]


def test_compiled_and_exported() -> None:
    def both(a: Tensor, b: Tensor) -> list[Tensor]:
        return ops.dequantize_list(ops.quantize_list([a, b], "nf4"), "nf4", [64, 100], torch.float32)

    arguments = torch.randn(3, 64), torch.randn(5, 100)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(*arguments)
    for got, expected in zip(compiled, both(*arguments), strict=True):
        assert torch.equal(got, expected)


# ---- callers ----


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names and lengths of the lists that halfbyte.nn.batches hands on."""
    seen: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        original = getattr(batches, name)

        def called(tensors: list[Tensor], *rest: Any) -> Any:
            seen.append((name, len(tensors)))
            return original(tensors, *rest)

        monkeypatch.setattr(batches, name, called)

    watch("quantize_list")
    watch("dequantize_list")
    return seen


def layers(count: int, k: int = 64, n: int = 32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(k, n) for _ in range(count)))


def test_quantize_model_packs_small_neighbours_by_one_call(calls: list[tuple[str, int]]) -> None:
    model = nn.Sequential(*layers(3), nn.ReLU(), *layers(2).bfloat16(), nn.Linear(600, 600), *layers(2))
    expected = [ops.quantize(m.weight.detach(), "nf4") for m in model if isinstance(m, nn.Linear)]
    halfbyte.quantize_model(model, "nf4", skip=())
    # One dtype a list; 600 x 600 float32 is more than 1 MiB and goes alone.
    assert calls == [("quantize_list", 3), ("quantize_list", 2), ("quantize_list", 2)]
    for layer, rows in zip((m for m in model if isinstance(m, QuantLinear)), expected, strict=True):
        assert torch.equal(layer.weight, rows)


def test_batches_hold_no_more_than_their_bytes(calls: list[tuple[str, int]]) -> None:
    model = layers(9, 512, 128)  # 256 KiB each
    halfbyte.quantize_model(model, "nf4", skip=())
    assert [length for _, length in calls] == [4, 4]  # and one alone


def test_dense_weights_come_in_order_and_by_kind(calls: list[tuple[str, int]]) -> None:
    model = nn.Sequential(*layers(2), *layers(3))
    for i, layer in enumerate(model):
        model[i] = QuantLinear.from_linear(layer, "nf4" if i < 2 else "int8")
    calls.clear()
    packed: list[Any] = list(model)
    found = list(batches.dense_weights(packed, lambda layer: torch.bfloat16))
    assert [layer for layer, _ in found] == packed
    assert calls == [("dequantize_list", 2), ("dequantize_list", 3)]
    for layer, weight in found:
        assert torch.equal(weight, layer.dequantize(torch.bfloat16))


def test_layers_on_meta_and_of_foreign_dtypes_go_alone(calls: list[tuple[str, int]]) -> None:
    with torch.device("meta"):
        model = layers(3)
    halfbyte.quantize_model(model, "nf4", skip=())
    assert calls == []
    assert all(m.weight.is_meta and m.weight.dtype == torch.uint8 for m in model)
    with pytest.raises(TypeError, match=r"quantize: tensor must be .*, got float64"):
        quantize_linears_(layers(2).double(), halfbyte.Format.parse("nf4"), None)


def test_a_batch_reads_its_layers_only_when_it_comes_to_them() -> None:
    """What is decoded next must not be held while a batch is used."""
    taken: list[int] = []

    def source() -> Iterator[Any]:
        for i, layer in enumerate(packed):
            taken.append(i)
            yield layer

    packed = [QuantLinear.from_linear(layer) for layer in layers(9, 512, 128)]
    weights = batches.dense_weights(source(), lambda layer: torch.float32)
    next(weights)
    assert len(taken) == 5  # a batch of 4, and the one that did not fit
