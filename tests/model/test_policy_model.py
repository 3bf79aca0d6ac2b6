import pytest
import torch

from tests.model.test_build import filled
from verl_memopt.errors import ConfigError
from verl_memopt.model.packed_model import dtype_of
from verl_memopt.model.packing import pack_rows

PROMPTS, RESPONSES = [[5, 6, 7], [8], [9, 10]], [[11, 12], [13, 14, 15], []]


def pack():
    def flat(rows):
        return torch.tensor([token for row in rows for token in row])

    return pack_rows(flat(PROMPTS), list(map(len, PROMPTS)), flat(RESPONSES), list(map(len, RESPONSES)))


def test_tied_embeddings_are_noticed(tiny_folder, untied_folder):
    assert filled(tiny_folder).tied
    assert not filled(untied_folder).tied


def test_an_unknown_dtype_is_refused_with_its_key():
    with pytest.raises(ConfigError, match=r"actor\.fsdp_config\.dtype=int3"):
        dtype_of("int3", "actor.fsdp_config.dtype")
