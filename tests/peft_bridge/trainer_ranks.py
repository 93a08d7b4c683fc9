"""One of the ranks that test_trainers.py starts: `trainer_ranks.py CHECKPOINT FOLDER hf|sft`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
checkpoint, folder, kind = sys.argv[1:]
os.environ.update(ACCELERATE_USE_CPU="true", FSDP_VERSION="2", HF_HUB_OFFLINE="1")
os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]

import accelerate.state  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402


def force_fsdp():
    """On CPU accelerate takes every job for DDP, whatever its FSDP plugin says."""
    original = accelerate.state.AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            accelerate.state.PartialState._shared_state["distributed_type"] = self.distributed_type

    accelerate.state.AcceleratorState.__init__ = init


def main():
    force_fsdp()
    from test_trainers import check, losses, run

    from halfbyte.nn import QuantLinear

    settings = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,
            "state_dict_type": "FULL_STATE_DICT",
        },
        "per_device_train_batch_size": 2,
    }
    trainer = run(kind, checkpoint, folder, **settings)
    assert trainer.is_fsdp_enabled
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    packed = [module for module in trainer.model_wrapped.modules() if isinstance(module, QuantLinear)]
    assert len(packed) == 14
    for module in packed:
        assert isinstance(module.weight, DTensor) and module.weight.dtype == torch.uint8
        assert module.weight.to_local().shape[0] == module.out_features // 2
    check(trainer, torch.float32, torch.float32)
    trainer.save_model(f"{folder}/final")
    dist.barrier()
    if dist.get_rank() == 0:
        from peft import PeftModel
        from test_trainers import load

        again = PeftModel.from_pretrained(load(checkpoint, torch.float32), f"{folder}/final")
        assert any(float(p.abs().max()) > 0 for name, p in again.named_parameters() if "lora_B" in name)
    print("LOSSES", losses(trainer))
    dist.barrier()


if __name__ == "__main__":
    main()
