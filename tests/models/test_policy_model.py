import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.test_build import filled
from verl_memopt.errors import ConfigError
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.policy_model import dtype_of

PROMPTS, RESPONSES = [[5, 6, 7], [8], [9, 10]], [[11, 12], [13, 14, 15], []]


def pack():
    def flat(rows):
        return torch.tensor([token for row in rows for token in row])

    return pack_rows(flat(PROMPTS), list(map(len, PROMPTS)), flat(RESPONSES), list(map(len, RESPONSES)))


def naive(folder, temperature):
    """Log-probs and entropies from transformers' own logits, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    log_probs, entropies = [], []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        log_p = (model(torch.tensor([prompt + response])).logits[0].float() / temperature).log_softmax(-1)
        rows = log_p[len(prompt) - 1 : len(prompt) - 1 + len(response)]
        log_probs += [rows[index, token] for index, token in enumerate(response)]
        entropies += list(-(rows.exp() * rows).sum(-1))
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("which", ["tiny_folder", "untied_folder"])
def test_packed_log_probs_and_entropies_equal_those_of_transformers(which, temperature, request):
    folder = request.getfixturevalue(which)
    policy = filled(folder)
    log_probs, entropies = policy(pack(), temperature, True)
    expected_log_probs, expected_entropies = naive(folder, temperature)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=4e-6)


def test_tied_embeddings_are_noticed(tiny_folder, untied_folder):
    assert filled(tiny_folder).tied
    assert not filled(untied_folder).tied


def test_gradients_of_a_pack_equal_those_of_single_rows(tiny_folder):
    policy = filled(tiny_folder)
    policy(pack(), 1.0, False)[0].sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        single = pack_rows(torch.tensor(prompt), [len(prompt)], torch.tensor(response, dtype=torch.int64), [len(response)])
        policy(single, 1.0, False)[0].sum().backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_an_unknown_dtype_is_refused_with_its_key():
    with pytest.raises(ConfigError, match=r"actor\.fsdp_config\.dtype=int3"):
        dtype_of("int3", "actor.fsdp_config.dtype")
