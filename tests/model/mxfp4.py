"""Folders of tiny gpt-oss models whose experts are stored in MXFP4, as published ones are."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from verl_memopt.model.tiny import TinyShape, make_tiny_model

SHAPE = TinyShape("gpt_oss", num_heads=4, num_kv_heads=2, tie_embeddings=False, initializer_range=0.06)


def stored_codes(shape, generator):
    """Gives random codes and scales of experts of the model's ``shape`` [E, n, m]; weights are near 0.06."""
    count, width, outputs = shape
    blocks = torch.randint(256, (count, outputs, width // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(119, 123, (count, outputs, width // 32), generator=generator, dtype=torch.uint8)


def folders(parent, shape=SHAPE):
    """Gives a folder in MXFP4, and one with the weights that transformers decodes from it."""
    generator = torch.Generator().manual_seed(1)
    packed, plain = (make_tiny_model(parent / name, shape, seed=3) for name in ("packed", "plain"))
    weights = load_file(plain / "model.safetensors")
    stored = {}
    for name in list(weights):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = stored_codes(weights[name].shape, generator)
            weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float()
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            if weights[name].dim() == 1 or name.endswith("_bias"):
                weights[name] = weights[name] + 0.1 * torch.randn(weights[name].shape, generator=generator)
            stored[name] = weights[name]
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain
