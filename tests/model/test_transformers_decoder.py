import logging

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.model.architectures import tiny_folder
from tests.model.test_pack import packed
from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_checkpointing_torch import Checkpointed
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.attention import KERNELS
from verl_memopt.model.decoder import Decoder
from verl_memopt.model.packed_model import logits_of_row, own_attention, register_kernels, states_of_pack
from verl_memopt.model.packing import pack_rows

CPU = torch.device("cpu")
GROUPS = [0, 0, 1]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11]] * 2 + [[12, 13]]
ANSWERS = [[14, 15, 16], [17, 18], [19, 20, 21, 22]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a type whose blocks are not the family's: norms come after attention and after the MLP."""
    return tiny_folder(tmp_path_factory.mktemp("other") / "model", "olmo2", 0.02)


def built(folder, mesh, recompute=False, **model):
    settings = Model(path=str(folder), attn_implementation="sdpa", **model)
    policy = build_policy(settings, Fsdp(dtype="fp32"), folder, mesh, CPU, ModelUse(recompute=recompute, trained=True))
    materialize(policy, folder, CPU)
    return policy


def test_a_row_alone_is_computed_by_transformers_own_attention(folder, one_rank):
    policy = built(folder, one_rank)
    assert not isinstance(policy.decoder, Decoder)
    assert not policy.supports_prefix_kv
    row = pack_rows(torch.tensor(PROMPTS[0]), [7], torch.tensor(ANSWERS[0]), [3])
    before = policy.lm.config._attn_implementation
    with torch.no_grad():
        logits = logits_of_row(policy.lm, row)
        states = states_of_pack(policy.decoder, row)
    assert logits.shape == (9, 320)
    assert policy.lm.config._attn_implementation == before == "packed_sdpa"
    head = policy.lm.get_output_embeddings().weight
    torch.testing.assert_close(nn.functional.linear(states, head), logits, rtol=0, atol=1e-5)


def fails_inside(lm):
    with own_attention(lm):
        raise RuntimeError(lm.config._attn_implementation)


def test_own_attention_comes_back_after_an_error(folder, one_rank):
    policy = built(folder, one_rank)
    with pytest.raises(RuntimeError, match=r"^eager$"):
        fails_inside(policy.lm)
    assert policy.lm.config._attn_implementation == "packed_sdpa"


def test_transformers_knows_every_kernel_by_its_name():
    register_kernels()
    assert set(KERNELS) <= set(ALL_ATTENTION_FUNCTIONS.valid_keys())


def gradients(policy):
    log_probs, _ = policy(packed(PROMPTS, ANSWERS, GROUPS), 1.0, False)
    log_probs.sum().backward()
    return [log_probs.detach(), *(parameter.grad for parameter in policy.parameters())]


@pytest.mark.parametrize("mode", ["full", "every_n", "selective"])
def test_checkpointing_another_architecture_changes_no_bit_and_no_name(folder, one_rank, mode):
    plain, recomputed = built(folder, one_rank), built(folder, one_rank, True, gradient_checkpointing_mode=mode)
    assert any(isinstance(block, Checkpointed) for block in recomputed.blocks())
    assert list(plain.state_dict()) == list(recomputed.state_dict())
    assert [type(block).__name__ for block in plain.blocks()] == [type(block).__name__ for block in recomputed.blocks()]
    assert all(torch.equal(one, other) for one, other in zip(gradients(plain), gradients(recomputed), strict=True))


def test_knobs_that_need_a_block_of_the_family_are_named_once(folder, one_rank, caplog):
    with caplog.at_level(logging.WARNING):
        built(folder, one_rank)
    for knob in ("recompute_elementwise", "prune_last_block"):
        told = [record.getMessage() for record in caplog.records if f"{knob}=true" in record.getMessage()]
        assert len(told) == 1
        assert "Olmo2DecoderLayer is not one of " in told[0]
    with pytest.raises(ConfigError, match=r"tiled_mlp.enabled=true: Olmo2DecoderLayer computes Olmo2MLP; tiles are known for"):
        built(folder, one_rank, tiled_mlp=TiledMlp(enabled=True))
