"""One of the ranks that test_experts.py starts: packed experts sharded on dim 0, losses and gradients of one process."""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from ranks import gloo_group
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import halfbyte
from halfbyte.distributed import fully_shard
from halfbyte.nn import QuantExperts


def build():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24, vocab_size=128,
        num_experts=3, num_experts_per_tok=2, moe_intermediate_size=72, decoder_sparse_step=1, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    halfbyte.quantize_model(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    return model.train()


def main(rank):
    batches = torch.randint(0, 128, (2, 2, 9), generator=torch.Generator().manual_seed(1))
    single = build()
    loss = sum(single(input_ids=batch, labels=batch).loss for batch in batches) / 2
    loss.backward()
    expected = {name: p.grad for name, p in single.named_parameters() if p.requires_grad}
    model = fully_shard(build(), checkpointing=True)
    stacks = [m for m in model.modules() if isinstance(m, QuantExperts)]
    assert len(stacks) == 2
    for module in stacks:
        for name, (E, N, _) in module.weight_shapes.items():
            weight = module.get_parameter(name)
            assert isinstance(weight, DTensor) and weight.dtype == torch.uint8
            local = weight.to_local()
            assert local.shape[0] == (2, 1)[rank] and tuple(weight.shape[:2]) == (E, N)  # 3 experts: 2 and 1
    found = model(input_ids=batches[rank], labels=batches[rank]).loss
    found.backward()
    mean = found.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / 2, loss.detach(), rtol=1e-5, atol=1e-6)
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys() and len(gradients) == 8
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7, msg=name)
    print("SAME")


if __name__ == "__main__":
    with gloo_group() as rank:
        main(rank)
