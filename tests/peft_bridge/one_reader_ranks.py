"""One of the ranks that test_one_reader.py starts: rank 1 has no weights, and gets rank 0's."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])

import pytest
import torch
import torch.distributed as dist
from hub_models import CONFIGS, saved
from replicate_ranks import digest, same
from transformers import AutoModelForCausalLM, TrainingArguments

from halfbyte.nn.packed import Packed
from peft_bridge import HalfbyteConfig, load_model, one_reader


def load(path, format="nf4", **settings):
    config = HalfbyteConfig(format, **settings)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.float32)


def main(folder):
    rank = int(os.environ["RANK"])
    assert not one_reader.accelerate_runs()
    TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[]).device  # noqa: B018 - sets accelerate's state up
    assert one_reader.accelerate_runs()
    for name in CONFIGS:
        own = folder / f"{name}-{rank}"
        if rank == 0:  # transformers writes on no other
            for each in (0, 1):
                saved(name, folder / f"{name}-{each}")
            (folder / f"{name}-1" / "model.safetensors").unlink()
        dist.barrier()
        torch.manual_seed(3)
        model = load(own)
        assert sum(isinstance(module, Packed) for module in model.modules()) >= 8
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.requires_grad_(True)
        same(model)
        if rank == 0:
            assert digest(load(own, one_reader=False)) == digest(model)
        else:
            with pytest.raises(OSError, match="model.safetensors"):
                load(own, one_reader=False)
        dist.barrier()

    own = folder / f"llama-{rank}"
    same(load_model(own, "int8", lora={"r": 4}))  # which lets one rank read by itself
    _, info = AutoModelForCausalLM.from_pretrained(own, quantization_config=HalfbyteConfig(), output_loading_info=True)
    assert not info["missing_keys"]
    placed = AutoModelForCausalLM.from_pretrained(own, quantization_config=HalfbyteConfig(), device_map={"": "cpu"})
    assert placed.hf_device_map == {"": "cpu"}

    packed = folder / "packed"
    load(own).save_pretrained(packed)  # packed: every rank maps the file
    dist.barrier()
    assert "one_reader" not in (packed / "config.json").read_text()
    assert digest(AutoModelForCausalLM.from_pretrained(packed)) == digest(load(own))

    with pytest.raises(RuntimeError, match="different models: rank 0 LlamaForCausalLM in fp4, rank 1 .* in int8"):
        load(own, ("fp4", "int8")[rank])
    if rank == 0:
        one_reader.ARRIVAL_S, begin = 2.0, time.monotonic()
        with pytest.raises(RuntimeError, match="rank 0 waited 2 s for rank 1 to load Llama.* in nf4: .*one_reader=F"):
            load(own)
        assert time.monotonic() - begin < 10
        one_reader.ARRIVAL_S = 300.0
    dist.barrier()
    same_again = load(own)  # nothing is left of it
    found = [None, None]
    dist.all_gather_object(found, digest(same_again))
    assert found[0] == found[1]
    dist.barrier()
    print("DONE")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
