"""What becomes a unit, and what happens where nothing would."""

from __future__ import annotations

import functools

import pytest
import torch
from sharded_models import Block, Model, packed_layers
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as by_class

from halfbyte.distributed import audit, wrap_policy
from halfbyte.distributed.fsdp1 import chosen_by, separate_parameters, units_of
from halfbyte.distributed.grouping import blocks, clean_name, shared_parameters, tables


class Nested(nn.Module):
    """Experts inside blocks, as in a mixture of experts: the block is the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_blocks_are_the_outermost_repeated_members() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Nested() for _ in range(2))
    model.losses = nn.ModuleList([nn.MSELoss(), nn.MSELoss()])  # no parameters: nothing to gather
    model.odd = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    assert list(blocks(model)) == ["layers.0", "layers.1"]


def test_blocks_are_what_the_model_names_wherever_it_sits() -> None:
    model = nn.Module()
    model.inner = Model()
    model.inner._no_split_modules = ["Adapted"]
    found = blocks(model)
    assert len(found) == 6 and "inner.layers.2.down" in found


def test_tables_are_units_unless_tied() -> None:
    untied, tied = Model(), Model(tied=True)
    assert list(tables(untied, shared_parameters(untied))) == ["embedding", "head"]
    assert tables(tied, shared_parameters(tied)) == {}
    assert shared_parameters(tied) == [tied.embedding.weight]


def test_names_are_those_of_the_model_before_it_was_wrapped() -> None:
    assert clean_name("_fsdp_wrapped_module.net._checkpoint_wrapped_module.fc.weight") == "net.fc.weight"


@pytest.mark.parametrize(
    "policy",
    [
        {Block},
        ModuleWrapPolicy({Block}),
        CustomPolicy(lambda module: isinstance(module, Block)),
        functools.partial(by_class, transformer_layer_cls={Block}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=6000),
    ],
    ids=["set", "ModuleWrapPolicy", "CustomPolicy", "function", "size"],
)
def test_every_kind_of_policy_is_understood(policy: object) -> None:
    model = Model()
    units = units_of(model, policy)
    assert {m for m in units if isinstance(m, Block)} == set(model.layers)
    assert [units[layer] for layer in packed_layers(model)] == [{"mixed_precision": None}] * 6


@pytest.mark.parametrize(
    "policy",
    [
        {nn.TransformerEncoderLayer},
        functools.partial(by_class, transformer_layer_cls={nn.TransformerEncoderLayer}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=10**9),
    ],
    ids=["set", "function", "size"],
)
def test_a_policy_that_matches_nothing_raises_with_the_candidates(policy: object) -> None:
    with pytest.raises(ValueError, match=r"auto_wrap_policy: .* matches no module of Model.*choose from: .*\.Block"):
        wrap_policy(Model(), policy)
    with pytest.raises(ValueError, match=r"activation_checkpointing_policy: .* matches no module"):
        chosen_by(policy, Model(), "activation_checkpointing_policy")


def test_inference_that_finds_nothing_raises() -> None:
    class Pair(nn.Sequential):
        pass

    model = nn.Sequential(Pair(nn.Linear(2, 2), nn.ReLU()), Pair(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"found no repeated blocks.*Candidates: .*Pair \(2x\)"):
        wrap_policy(model)


def test_containers_keep_bytes_keys_and_results() -> None:
    model, input = Model(), torch.arange(6).view(1, 6)
    expected, state = model(input), {k: v.clone() for k, v in model.state_dict().items()}
    policy = wrap_policy(model)
    wrap_policy(model)  # twice changes nothing
    layer = packed_layers(model)[0]
    assert layer.weight.dtype == torch.float32 and layer.packed.dtype == torch.uint8
    assert policy._lambda_fn(layer) == {"mixed_precision": None} and policy._lambda_fn(model.layers[0]) is True
    assert torch.equal(model(input), expected)
    contained = model.state_dict()
    assert list(contained) == list(state)
    assert contained._metadata["layers.0.up.base"]["format"] == "nf4"
    for key, value in contained.items():
        assert value.dtype == state[key].dtype and torch.equal(value, state[key]), key
    other = Model()
    wrap_policy(other)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(state)
    assert torch.equal(other(input), expected)
    plain = Model()
    plain.load_state_dict(contained)  # and back into a model without containers
    assert torch.equal(plain(input), expected)


def test_a_container_takes_dense_weights_and_rows_at_any_offset() -> None:
    layer = packed_layers(Model())[0]
    dense, rows = layer.dequantize(torch.float32), layer.packed.clone()
    layer.to_container_()
    layer.weight.data.zero_()
    layer.load_state_dict({"weight": dense, "bias": layer.bias})
    assert torch.equal(layer.packed, rows)
    shifted = torch.empty(rows.numel() + 1, dtype=torch.uint8)[1:].view_as(rows).copy_(rows)
    layer.weight.data.zero_()
    layer.load_state_dict({"weight": shifted, "bias": layer.bias})
    assert torch.equal(layer.packed, rows)


def test_a_trainable_bias_needs_the_dtype_of_the_container() -> None:
    model = Model()
    bias = model.layers[1].up.base.bias
    assert separate_parameters(model) == []  # float32 and frozen: part of its layer's unit
    bias.data = bias.data.to(torch.bfloat16)
    assert [id(p) for p in separate_parameters(model)] == [id(bias)]
    bias.requires_grad_(True)
    with pytest.raises(NotImplementedError, match=r"layers.1.up.base.bias is trainable and torch.bfloat16.*FSDP2Strategy"):
        wrap_policy(model)


def test_frozen_parameters_of_another_dtype_than_the_trained_ones_stay_outside() -> None:
    model = Model()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(torch.bfloat16)
    assert {id(p) for p in separate_parameters(model)} == {id(p) for m in model.layers for p in m.norm.parameters()}
    model.layers[2].norm.requires_grad_(True)
    with pytest.raises(ValueError, match=r"one FSDP1 unit must have one dtype, layers.2 has torch.bfloat16, torch.float32"):
        separate_parameters(model)


def test_the_audit_of_a_model_that_is_not_sharded() -> None:
    model = Model()
    report = audit(model)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert report.kind == "none" and report.units == () and len(report.outside) == len(list(model.parameters()))
    assert report.local_bytes == report.expected_peak == size
    assert f"{size / 1e6:.2f} MB on every rank" in str(report)
