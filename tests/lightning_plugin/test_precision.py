"""HalfbytePrecision and FabricHalfbytePrecision in one process: what is quantized, when, and equality with a plain loop."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricFSDPPrecision
from lightning.fabric.plugins.precision.precision import Precision as FabricPrecision
from lightning.fabric.utilities.throughput import _plugin_to_compute_dtype
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.plugins.precision.precision import Precision
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning_models import LR, STEPS, Batches, Module, Net, batch, losses_by_hand, packed_net, trainer
from torch import nn

import halfbyte
from halfbyte.nn import QuantEmbedding, QuantLinear
from halfbyte.nn.settings import active_settings
from lightning_plugin import FabricHalfbytePrecision, HalfbytePrecision

# What may come from Lightning's base class: hooks that do nothing, call the LightningModule, or dispatch to overridden ones.
INHERITED = {
    HalfbytePrecision: {
        "_after_closure",
        "_clip_gradients",
        "_wrap_closure",
        "backward",
        "clip_grad_by_value",
        "clip_gradients",
        "main_params",
        "on_load_checkpoint",
        "on_save_checkpoint",
        "optimizer_step",
        "post_backward",
        "predict_step_context",
        "test_step_context",
        "train_step_context",
        "unscale_gradients",
        "val_step_context",
    },
    FabricHalfbytePrecision: {
        "backward",
        "main_params",
        "optimizer_step",
        "post_backward",
        "pre_backward",
        "teardown",
        "unscale_gradients",
    },
}


@pytest.mark.parametrize("plugin", INHERITED)
def test_nothing_comes_from_fsdp_precision_and_the_rest_is_listed(plugin: type) -> None:
    inherited = set()
    for name in dir(plugin):
        value = inspect.getattr_static(plugin, name)
        function = value.fget if isinstance(value, property) else value
        if not inspect.isfunction(function) or name.startswith("__"):
            continue
        assert f"{FSDPPrecision.__name__}." not in function.__qualname__, f"{name} is FSDPPrecision's"
        if function.__module__.startswith("lightning."):
            inherited.add(name)
    assert inherited == INHERITED[plugin]
    assert plugin.__init__ not in (FSDPPrecision.__init__, FabricFSDPPrecision.__init__)


def test_every_method_of_fsdp_precision_is_overridden() -> None:
    for plugin, base in ((HalfbytePrecision, FSDPPrecision), (FabricHalfbytePrecision, FabricFSDPPrecision)):
        own = {name for name, value in vars(base).items() if inspect.isfunction(value) or isinstance(value, property)}
        assert len(own) > 10
        for name in own:
            assert inspect.getattr_static(plugin, name) is not vars(base)[name], name


@pytest.mark.parametrize("where", ["init", "configure"])
def test_fit_equals_the_loop_written_by_hand(where: str) -> None:
    module = Module(where)
    trainer(HalfbytePrecision("nf4")).fit(module)
    expected = losses_by_hand(packed_net())[0]
    assert module.losses == expected
    assert expected[-1] < expected[0]
    assert [type(layer) for layer in (module.net.first, module.net.second, module.net.classifier)] == [
        QuantLinear,
        QuantLinear,
        nn.Linear,
    ]
    assert torch.equal(module.net.first.weight, packed_net().first.weight)  # frozen, and packed as by hand


def test_model_built_in_init_module_is_quantized_from_birth() -> None:
    run = trainer(HalfbytePrecision("int8"))
    with run.init_module():
        module = Module("init")
        assert type(module.net.first) is QuantLinear
    assert module.net.first.format.codebook == "int8"
    assert type(module.net.classifier) is nn.Linear
    run.fit(module)
    assert module.losses == losses_by_hand(packed_net("int8"))[0]


def test_transformers_llama_equals_the_loop_written_by_hand() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (STEPS, 2, 16), generator=torch.Generator().manual_seed(3))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).train()

    class Language(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = None, []

        def configure_model(self) -> None:
            self.model = build()

        def training_step(self, _, index):
            loss = self.model(input_ids=tokens[self.global_step], labels=tokens[self.global_step]).loss
            self.losses.append(loss.item())
            return loss

        configure_optimizers = Module.configure_optimizers
        train_dataloader = Module.train_dataloader

    module = Language()
    trainer(HalfbytePrecision("nf4")).fit(module)
    model = build()
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != "lm_head":
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, QuantLinear.from_linear(layer, "nf4"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    expected = []
    for step in range(STEPS):
        loss = model(input_ids=tokens[step], labels=tokens[step]).loss
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert module.losses == expected
    assert sum(isinstance(layer, QuantLinear) for layer in module.modules()) == 14
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight


def test_convert_module_changes_nothing_the_second_time_and_keeps_what_was_recorded_as_dense() -> None:
    with halfbyte.init_quantized("int8", skip=("first",)):
        net = Net()
    plugin = HalfbytePrecision("nf4", skip=())
    assert plugin.convert_module(net) is net
    assert type(net.first) is nn.Linear  # the context said so
    assert str(net.second.format) == "int8"  # packed already
    rows = net.second.weight
    plugin.convert_module(net)
    assert net.second.weight is rows


def test_a_model_without_anything_to_quantize_raises() -> None:
    with pytest.raises(halfbyte.QuantizationError, match=r"HalfbytePrecision: nothing was quantized: .*no nn\.Linear"):
        HalfbytePrecision().convert_module(nn.Sequential(nn.Conv2d(1, 1, 1)))
    with pytest.raises(halfbyte.QuantizationError, match="first: skip='first'") as caught:
        trainer(HalfbytePrecision(skip=("first", "second", "classifier"))).fit(Module("init"))
    assert caught.value.names == ("net.first", "net.second", "net.classifier")


def test_adapters_of_a_peft_model_built_in_init_stay_dense_and_trainable() -> None:
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["first", "second"], r=4))
    HalfbytePrecision("nf4", trainable_dtype="bfloat16").convert_module(net)
    kinds = {name.rsplit("model.", 1)[-1]: type(m) for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind is QuantLinear} == {"first.base_layer", "second.base_layer"}
    trainable = {name: p.dtype for name, p in net.named_parameters() if p.requires_grad}
    assert len(trainable) == 4
    assert set(trainable.values()) == {torch.bfloat16}


def test_trainable_dtype_casts_in_place_and_only_what_trains() -> None:
    net = Net()
    net.norm.weight.requires_grad_(False)
    bias = net.first.bias
    HalfbytePrecision("nf4", trainable_dtype="bfloat16").convert_module(net)
    assert net.first.bias is bias
    assert bias.dtype == net.classifier.weight.dtype == torch.bfloat16
    assert net.norm.weight.dtype == torch.float32
    assert net.first.weight.dtype == torch.uint8


def test_the_contexts_quantize_modules_and_touch_nothing_else() -> None:
    plugin = HalfbytePrecision("nf4")
    for context in (plugin.tensor_init_context, plugin.module_init_context):
        with context():
            assert torch.empty(1).dtype == torch.float32
            tensor = torch.arange(4, dtype=torch.uint8)
            tensor.mul_(2)
            assert tensor.tolist() == [0, 2, 4, 6]
            assert type(nn.Linear(32, 8)) is QuantLinear
            assert type(nn.Conv1d(2, 2, 1)) is nn.Conv1d
        assert active_settings() is None
    with plugin.tensor_init_context(), plugin.module_init_context():
        assert len(halfbyte.nn.settings.stack()) == 1
    with FabricHalfbytePrecision().tensor_init_context():  # Fabric has a context for modules of its own
        assert type(nn.Linear(32, 8)) is nn.Linear


def test_nothing_is_cast_around_forward() -> None:
    for plugin in (
        HalfbytePrecision("nf4", compute_dtype="bfloat16"),
        FabricHalfbytePrecision("nf4", compute_dtype="bfloat16"),
    ):
        data = {"x": torch.ones(2), "y": [torch.ones(2, dtype=torch.float64)]}
        with plugin.forward_context():
            assert torch.get_default_dtype() == torch.float32
            assert not torch.is_autocast_enabled("cpu")
            assert plugin.convert_input(data) is data
            assert plugin.convert_output(data) is data
        config = plugin.mixed_precision_config
        assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (None, None, None)


def test_precision_is_a_name_that_lightning_knows() -> None:
    assert HalfbytePrecision().precision == "32-true"
    assert HalfbytePrecision(compute_dtype=torch.bfloat16).precision == "bf16-true"
    assert FabricHalfbytePrecision(compute_dtype="float16").precision == "16-true"
    assert _plugin_to_compute_dtype(FabricHalfbytePrecision()) == torch.float32
    module = Module("init").to(torch.bfloat16)  # the batch stays float32: the first packed layer casts it
    run = trainer(HalfbytePrecision(compute_dtype="bfloat16"), max_steps=1)
    run.fit(module)
    assert run.precision == "bf16-true"
    assert "classifier" in str(ModelSummary(module, max_depth=2))


@pytest.mark.parametrize("plugin", [HalfbytePrecision, FabricHalfbytePrecision])
def test_arguments_are_checked_when_they_are_given(plugin: type) -> None:
    with pytest.raises(ValueError, match="nf3"):
        plugin("nf3")
    with pytest.raises(ValueError, match="compute_dtype must be one of float32, bfloat16, float16, got 'bf16'"):
        plugin(compute_dtype="bf16")
    with pytest.raises(TypeError, match="trainable_dtype"):
        plugin(trainable_dtype=torch.int8)
    with pytest.raises(TypeError, match=r"write \('lm_head',\)"):
        plugin(skip="lm_head")
    assert plugin(halfbyte.Format.parse("nf4-dq:128")).format == "nf4-dq:128"
    assert pickle.loads(pickle.dumps(plugin("int8"))).format == "int8"


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm: str) -> None:
    module = Module("init")
    seen: list[float] = []
    module.on_before_zero_grad = lambda optimizer: seen.append(  # after clipping and the step
        max((float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None), default=0.0)
    )
    trainer(HalfbytePrecision(), gradient_clip_val=0.01, gradient_clip_algorithm=algorithm).fit(module)
    if algorithm == "norm":
        assert module.losses == losses_by_hand(packed_net(), clip=0.01)[0]
    else:
        assert module.losses != losses_by_hand(packed_net())[0]
    assert 0 < max(seen) <= 0.01


def test_validate_test_and_predict() -> None:
    module, net = Module("init"), packed_net()
    run = trainer(HalfbytePrecision())
    run.validate(module, verbose=False)
    run.test(module, verbose=False)
    outputs = run.predict(module)
    with torch.no_grad():
        expected = [nn.functional.cross_entropy(net(x), y).item() for x, y in (batch(500), batch(501))]
        assert module.evaluated == expected * 2
        assert all(torch.equal(output, net(batch(i)[0])) for i, output in enumerate(outputs))


def test_fabric_equals_the_loop_written_by_hand() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=FabricHalfbytePrecision("nf4"))
    with fabric.init_module():
        net = Net()
    assert type(net.first) is QuantLinear
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=LR)
    model, optimizer = fabric.setup(net, optimizer)
    losses = []
    for step in range(STEPS):
        input, target = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(input), target)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        losses.append(loss.item())
    assert losses == losses_by_hand(packed_net(), clip=0.5)[0]


def test_fabric_setup_converts_and_warns_of_an_optimizer_that_keeps_dense_weights() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=FabricHalfbytePrecision("nf4"))
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    with pytest.warns(UserWarning, match="2 dense weights were quantized but something still refers to them.*first"):
        model, optimizer = fabric.setup(net, optimizer)
    assert type(model.first) is QuantLinear


def test_fabric_state_round_trip(tmp_path) -> None:
    def start() -> tuple[Fabric, nn.Module]:
        fabric = Fabric(accelerator="cpu", devices=1, plugins=FabricHalfbytePrecision("nf4"))
        with fabric.init_module():
            net = Net(seed=int(torch.randint(100, ())))
        return fabric, fabric.setup(net)

    fabric, model = start()
    fabric.save(tmp_path / "f.ckpt", {"model": model})
    other_fabric, other = start()
    other_fabric.load(tmp_path / "f.ckpt", {"model": other})
    mine, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in mine)


def test_embeddings_packed_by_hand_are_left_alone() -> None:
    net = nn.Sequential(QuantEmbedding(16, 32), nn.Linear(32, 32))
    rows = net[0].weight
    HalfbytePrecision("nf4").convert_module(net)
    assert net[0].weight is rows
    assert type(net[1]) is QuantLinear


def test_only_our_plugin_is_converted_before_loading(tmp_path) -> None:
    """The wrapper around Strategy.load_model_state_dict acts for nobody else, and is installed once."""
    from lightning.pytorch.strategies import Strategy

    HalfbytePrecision()
    wrapped = Strategy.load_model_state_dict
    HalfbytePrecision()
    assert Strategy.load_model_state_dict is wrapped
    dense = Module("init")
    run = trainer(None, max_steps=2)
    run.fit(dense)
    run.save_checkpoint(tmp_path / "dense.ckpt")
    calls = []

    class Foreign(Precision):
        def convert_module(self, module: nn.Module) -> nn.Module:
            calls.append(torch.equal(module.net.first.weight, dense.net.first.weight))
            return module

    other = Module("init", seed=9)
    trainer(Foreign(), max_steps=4).fit(other, ckpt_path=tmp_path / "dense.ckpt")
    assert calls == [True]  # once, and after the weights were loaded: Lightning's own order
    assert type(other.net.first) is nn.Linear
    assert len(other.losses) == 2


def test_pytorch_lightning_works_if_it_is_what_was_imported_and_importing_patches_nothing() -> None:
    code = (
        "import sys, pytorch_lightning as L\n"
        "import lightning_plugin, lightning_plugin.distribution as d\n"
        "from lightning_plugin import HalfbytePrecision\n"
        "assert d.TRAINER_PACKAGE == 'pytorch_lightning', d.TRAINER_PACKAGE\n"
        "assert not hasattr(d.Strategy.load_model_state_dict, '_halfbyte')\n"
        "assert 'lightning.pytorch' not in sys.modules\n"
        "run = L.Trainer(plugins=HalfbytePrecision('nf4'), accelerator='cpu', logger=False, barebones=True, max_steps=2)\n"
        "assert type(run.precision_plugin) is HalfbytePrecision\n"
        "import torch\n"
        "class M(L.LightningModule):\n"
        "    def configure_model(self): self.fc = torch.nn.Linear(32, 32)\n"
        "    def training_step(self, batch, index): return self.fc(batch).square().mean()\n"
        "    def configure_optimizers(self): return torch.optim.SGD([self.fc.bias], lr=0.1)\n"
        "m = M(); run.fit(m, torch.ones(4, 32)); print(type(m.fc).__name__)\n"
    )
    pytest.importorskip("pytorch_lightning")
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "QuantLinear"


def test_the_other_distribution_refuses_by_name() -> None:
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    with pytest.raises(Exception, match=r"HalfbytePrecision\('nf4', built for lightning.pytorch\)"):
        pytorch_lightning.Trainer(plugins=HalfbytePrecision("nf4"), accelerator="cpu", logger=False)


def test_bases() -> None:
    assert isinstance(HalfbytePrecision(), Precision)
    assert isinstance(FabricHalfbytePrecision(), FabricPrecision)
    assert len(Batches()) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_clip_val": 0.5}, r"before Trainer\(gradient_clip_val=0.5\) could clip"),
        ({"accumulate_grad_batches": 2}, r"Trainer\(accumulate_grad_batches=2\) would not accumulate"),
    ],
)
def test_fused_backward_refuses_what_it_would_ignore(arguments: dict[str, float], message: str) -> None:
    class Fused(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            trainable = [p for p in self.parameters() if p.requires_grad]
            return halfbyte.optim.AdamW8bit(trainable, lr=LR, fused_backward=True)

    with pytest.raises(NotImplementedError, match=message):
        trainer(HalfbytePrecision("nf4"), **arguments).fit(Fused(), Batches())
    trainer(HalfbytePrecision("nf4")).fit(Fused(), Batches())
