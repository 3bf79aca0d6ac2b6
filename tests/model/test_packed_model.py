import pytest
import torch

from tests.critics import critic_for
from tests.model.test_build import filled
from tests.model.test_pack import packed
from verl_memopt.errors import ConfigError
from verl_memopt.model.block_options import BlockOptions
from verl_memopt.model.packed_model import dtype_of
from verl_memopt.model.packing import pack_prompt, pack_rows, pack_suffixes

PROMPT, ANSWERS = [5, 6, 7, 8], [[11, 12, 13], [14, 15]]
PACK = packed([[5, 6, 7], [8], [9, 10]], [[11, 12], [13, 14, 15], []])


def recomputed(folder):
    return filled(folder, options=BlockOptions(recompute=True))


@pytest.fixture(params=["policy", "critic"])
def model(request, untied_folder, one_rank):
    return recomputed(untied_folder) if request.param == "policy" else critic_for(untied_folder, one_rank).model


def test_both_models_compute_the_same_states(untied_folder, one_rank):
    policy, critic = recomputed(untied_folder), critic_for(untied_folder, one_rank, model={"prune_last_block": False}).model
    with torch.no_grad():
        states = [model.predicting_states(PACK, None) for model in (policy, critic)]
    assert torch.equal(*states)
    assert states[0].shape == (5, 64)


def test_states_of_a_row_alone_are_those_of_the_pack(model):
    with torch.no_grad():
        of_pack = model.predicting_states(PACK, None)
        alone = model.unpacked_states(pack_rows(torch.tensor([8]), [1], torch.tensor([13, 14, 15]), [3]))
    torch.testing.assert_close(of_pack[2:5], alone, rtol=0, atol=1e-5)


def test_states_after_a_prefix_kv_are_those_of_the_whole_rows(model):
    flat, sizes = torch.tensor([token for answer in ANSWERS for token in answer]), [len(answer) for answer in ANSWERS]
    with torch.no_grad():
        prefix = model.compute_prefix(pack_prompt(torch.tensor(PROMPT)))
        after = model.predicting_states(pack_suffixes(len(PROMPT), flat, sizes), prefix)
        whole = model.predicting_states(pack_rows(torch.tensor(PROMPT * 2), [len(PROMPT)] * 2, flat, sizes), None)
    torch.testing.assert_close(after, whole, rtol=0, atol=1e-5)


def test_tied_embeddings_are_noticed(tiny_folder, untied_folder):
    assert filled(tiny_folder).tied
    assert not filled(untied_folder).tied


def test_an_unknown_dtype_is_refused_with_its_key():
    with pytest.raises(ConfigError, match=r"actor\.fsdp_config\.dtype=int3"):
        dtype_of("int3", "actor.fsdp_config.dtype")
