"""One of the ranks that test_trainers.py starts: `trainer_ranks.py CHECKPOINT FOLDER`; prints the losses of each case."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
checkpoint, folder = sys.argv[1:]
os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]

import accelerate.state  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402
from peft import PeftModel, get_peft_model  # noqa: E402
from test_trainers import Rows, check, load, lora, losses, run  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from halfbyte.distributed import audit  # noqa: E402
from halfbyte.distributed.grouping import clean_name  # noqa: E402
from halfbyte.nn import QuantLinear  # noqa: E402


def force_fsdp():
    """On CPU accelerate takes every job for DDP, whatever its FSDP plugin says, calls the device cpu:0, and offloads."""
    original = accelerate.state.AcceleratorState.__init__
    state_dict_type = FullyShardedDataParallel.state_dict_type

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.device, self.fsdp_plugin = DistributedType.FSDP, torch.device("cpu"), fsdp_plugin
            for name in ("distributed_type", "device"):
                accelerate.state.PartialState._shared_state[name] = getattr(self, name)

    def without_offload(module, kind, *configs):
        for config in configs:  # torch frees what it offloaded, which on CPU is the same memory
            config.offload_to_cpu = False
            if hasattr(config, "rank0_only"):
                config.rank0_only = False
        return state_dict_type(module, kind, *configs)

    accelerate.state.AcceleratorState.__init__ = init
    FullyShardedDataParallel.state_dict_type = staticmethod(without_offload)


def fsdp(version, **config):
    """TrainingArguments of half the batch on each of two ranks."""
    config = {"version": version, "state_dict_type": "FULL_STATE_DICT", **config}
    if version == 1:
        config.update(sync_module_states="false")  # torch refuses it on CPU
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config, "per_device_train_batch_size": 2}


def case(name, version, kind="hf", config=None, dtype=torch.float32, adapters=None, **settings):
    trainer = run(kind, checkpoint, f"{folder}/{name}", dtype, adapters, **fsdp(version, **(config or {})), **settings)
    assert trainer.is_fsdp_enabled
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    assert trainer.accelerator.is_fsdp2 == (version == 2)
    print(f"CASE {name}: {losses(trainer)}", flush=True)
    return trainer


def is_sharded(model, version):
    packed = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(packed) == 14
    if version == 2:
        for module in packed:
            assert isinstance(module.weight, DTensor) and module.weight.dtype == torch.uint8
            assert module.weight.to_local().shape[0] == module.out_features // 2
        return
    report = audit(model)
    rows = {name: size for name, size in report.bytes_per_unit.items() if name.endswith("base_layer")}
    assert len(rows) == 14
    for name, module in ((n, m) for n, m in model.named_modules() if isinstance(m, QuantLinear)):
        size = module.out_features * module.format.row_bytes(module.in_features)
        size += 4 * module.out_features * (module.bias is not None and module.bias.dtype == torch.float32)
        assert rows[clean_name(name)] == size
    assert sum(map(torch.Tensor.numel, model.parameters())) < 0.55 * sum(report.bytes_per_unit.values())


def resumed(name, version, config=None, **settings):
    """Four steps in one go, and two and two with a checkpoint in between."""
    whole = case(name, version, config=config, max_steps=4, **settings)
    case(f"{name} first", version, config=config, max_steps=2, save_strategy="steps", save_steps=2, **settings)
    settings["resume"] = f"{folder}/{name} first/checkpoint-2"
    again = case(f"{name} resumed", version, config=config, max_steps=4, **settings)
    assert losses(again)[-2:] == losses(whole)[-2:]
    return whole


def in_one_process(trainer, name, modules_to_save=()):
    """What `save_model` wrote loads into an unsharded model and holds what was trained."""
    trainer.save_model(f"{folder}/{name}/final")
    dist.barrier()
    again = PeftModel.from_pretrained(load(checkpoint, torch.float32), f"{folder}/{name}/final")
    found = {n: p for n, p in again.named_parameters() if "lora_" in n or "modules_to_save" in n}
    with FullyShardedDataParallel.summon_full_params(trainer.model):
        trained = {clean_name(n): p for n, p in trainer.model.named_parameters() if p.requires_grad}
        assert trained.keys() == found.keys() and len(trained) == 28 + len(modules_to_save)
        assert all(torch.equal(found[n], p) for n, p in trained.items())
        assert any(float(p.abs().max()) > 0 for n, p in trained.items() if "lora_B" in n)


def raw_accelerate(name, state, policy):
    """The loop of accelerate's own examples: prepare, backward, clip, step; saved and resumed by save_state."""

    def steps(wrapped, optimizer, first, last):
        found = []
        for step in range(first, last):
            rows = Rows().ids[4 * step + 2 * accelerator.process_index :][:2]
            loss = wrapped(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(wrapped.parameters(), 0.05)
            assert float(norm) > 0.05
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(accelerator.reduce(loss.detach(), "mean")))
        return found

    def prepared(seed):
        torch.manual_seed(seed)
        model = accelerator.prepare(get_peft_model(load(checkpoint, torch.float32), lora()).train())
        is_sharded(model, 1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2, weight_decay=0.0)
        return model, accelerator.prepare(optimizer)

    for optimizer_steps in (4, 2, 0):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1, use_orig_params=True, state_dict_type=state, auto_wrap_policy=policy
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, optimizer = prepared(0 if optimizer_steps else 7)
        found = steps(model, optimizer, 0, optimizer_steps)
        if optimizer_steps == 4:
            whole = found
        elif optimizer_steps == 2:
            accelerator.save_state(f"{folder}/{name}")
        else:
            accelerator.load_state(f"{folder}/{name}")
            found = steps(model, optimizer, 2, 4)
            assert found == whole[2:], (found, whole)
    print(f"CASE {name}: {whole}", flush=True)


def main():
    force_fsdp()
    for version in (1, 2):
        trainer = resumed(f"hf-{version}", version)
        is_sharded(trainer.model_wrapped, version)
        if version == 1:
            in_one_process(trainer, f"hf-{version}")
        else:
            check(trainer, torch.float32, torch.float32)
        resumed(f"hf-{version} sharded", version, {"state_dict_type": "SHARDED_STATE_DICT"})
        case(f"sft-{version}", version, "sft")
        case(f"hf-{version} clipped", version, max_grad_norm=0.05)
        kwargs = {"use_reentrant": False}
        case(f"sft-{version} recomputed", version, "sft", gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
        case(f"hf-{version} blocks recomputed", version, config={"activation_checkpointing": True})
        case(f"sft-{version} packing", version, "sft", packing=True)
        case(f"hf-{version} bf16", version, dtype=torch.bfloat16, bf16=True)
    resumed("hf-1 flat", 1, {"use_orig_params": "false"})
    case("hf-1 gathered in backward only", 1, config={"reshard_after_forward": "shard_grad_op"})
    saved = resumed("hf-1 head", 1, modules_to_save=["lm_head"])
    in_one_process(saved, "hf-1 head", ["lm_head"])
    raw_accelerate("raw-1 full", "FULL_STATE_DICT", None)
    raw_accelerate("raw-1 sharded", "SHARDED_STATE_DICT", "TRANSFORMER_BASED_WRAP")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
