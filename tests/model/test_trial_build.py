import shutil
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForTokenClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.critics import with_value_head
from tests.model.architectures import text_name, tiny_folder, whole_model
from tests.model.doubles import in_double
from verl_memopt.config.schema import Actor, CriticModel, Fsdp, Model
from verl_memopt.errors import ConfigError
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.families import FAMILIES, working_types
from verl_memopt.model.packing import pack_groups, pack_rows
from verl_memopt.model.packing_check import check_architecture, check_packing
from verl_memopt.model.weights import named_weights

CPU = torch.device("cpu")
PROMPTS, ANSWERS, GROUPS = (17, 17, 5), (9, 6, 21), (0, 0, 1)

NO_WINDOW = "qwen2_moe"
"""A type whose packed rows are wrong with a window, so that it is refused with one."""

SLIDING = [kind for kind in working_types() if hasattr(CONFIG_MAPPING[kind](), "sliding_window") and kind != NO_WINDOW]
"""Tested types whose attention can slide over a window; a small one cuts every prompt here."""

REFUSED = [family for family in FAMILIES if family.refused is not None]

OTHERS = {"opt": "opt, whose positions come from a mask", "biogpt": "the same"}
"""Types that are in no list and train right: the check with the weights in place lets them through."""


SHAPED = {
    "cohere": {"logit_scale": 3.0},
    "cohere2": {"logit_scale": 3.0},
    "gemma2": {"final_logit_softcapping": 0.8, "attn_logit_softcapping": 0.3, "query_pre_attn_scalar": 4},
    "glm4_moe": {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
    "granite": {"logits_scaling": 0.25},
    "hyperclovax": {"logits_scaling": 1.5},
    "nanochat": {"final_logit_softcapping": 0.8},
}
"""Types that scale or cap their logits or scores, or choose experts among groups, with numbers that change the log-probs of a
small model."""

REFUSED_FIRST = ("apertus", "bart", "bert", "bloom", "gpt2", "mamba", "mixtral", "nemotron", "qwen3_next", "stablelm")
"""One of each reason, in every run of the tests. What a config tells of the others, test_architecture.py shows."""


def rows():
    generator = torch.Generator().manual_seed(1)
    prompts = {group: torch.randint(3, 320, (size,), generator=generator) for group, size in zip(GROUPS, PROMPTS, strict=True)}
    return [prompts[group] for group in GROUPS], [torch.randint(3, 320, (size,), generator=generator) for size in ANSWERS]


def theirs(folder):
    """Gives log-probs [R] of the answers from transformers' own forward of one row at a time, and the model."""
    # Eager, because transformers' SDPA leaves out what caps Gemma 2's scores.
    model = whole_model(folder, attn_implementation="eager")
    parts = []
    # In fp32 transformers' gradients of layers that carry a state are a hundred times as far from the exact ones as ours.
    carries = model.config.model_type.startswith("qwen3_5")
    with in_double(model) if carries else nullcontext():
        if carries:
            model = model.double()
            model.set_experts_implementation("eager")  # the other one refuses fp64
        for prompt, answer in zip(*rows(), strict=True):
            logits = model(input_ids=torch.cat([prompt, answer])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            parts.append(logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0])
    return torch.cat(parts).float(), model


def trained(folder, mesh, shared, **model):
    """Gives the model as in training, after both checks."""
    settings = Model(path=str(folder), **model)
    actor = Actor(use_prefix_grouper=shared)
    check_architecture(settings, folder, 64)
    model = build_policy(settings, Fsdp(dtype="fp32"), folder, mesh, CPU, ModelUse(recompute=True, trained=True))
    materialize(model, folder, CPU)
    check_packing(model, CPU, torch.float32, actor, str(folder))
    return model


def packed(model, shared):
    prompts, answers = rows()
    tokens = torch.cat(prompts), PROMPTS, torch.cat(answers), ANSWERS
    return model(pack_groups(*tokens, GROUPS) if shared else pack_rows(*tokens), 1.0, False)[0]


def fields_of(model_type):
    window = {"sliding_window": 8, "layer_types": None, "use_sliding_window": True, "max_window_layers": 1}
    return (window if model_type in SLIDING else {}) | SHAPED.get(model_type, {})


@pytest.mark.parametrize("model_type", [*working_types(), *OTHERS])
def test_a_type_that_is_accepted_gives_transformers_log_probs_and_gradients(tmp_path, one_rank, model_type):
    # Layers that carry a state amplify rounding if their weights are random and large.
    deviation = 0.03 if model_type.startswith("qwen3_5") else 0.06
    compared(tiny_folder(tmp_path / "model", model_type, deviation, **fields_of(model_type)), one_rank)


def compared(folder, mesh, **settings):
    """Compares log-probs and gradients, with and without shared prompts, and gives the model as in training."""
    expected, model = theirs(folder)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    gradients = {text_name(name): parameter.grad for name, parameter in model.named_parameters()}
    ours = trained(folder, mesh, True, **settings)
    for shared in (True, False):
        ours.zero_grad()
        found = packed(ours, shared)
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)
        (found * weights).sum().backward()
        for name, parameter in named_weights(ours):
            if not parameter.requires_grad:  # a factor that is no parameter of transformers
                continue
            torch.testing.assert_close(
                parameter.grad, gradients[name].float(), rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
    return ours


def test_a_window_that_a_type_computes_wrongly_is_refused(tmp_path, one_rank):
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    folder = tiny_folder(tmp_path / "model", NO_WINDOW, **window)
    with pytest.raises(ConfigError, match=rf"models of type {NO_WINDOW} give a row in a pack log-probs that are"):
        trained(folder, one_rank, True)


def test_eager_attention_of_a_type_that_needs_its_output_in_order(tmp_path, one_rank):
    folder = tiny_folder(tmp_path / "model", "jetmoe")
    found = packed(trained(folder, one_rank, False, attn_implementation="eager"), False)
    torch.testing.assert_close(found, theirs(folder)[0], rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.model_type, marks=[] if family.model_type in REFUSED_FIRST else pytest.mark.slow)
        for family in REFUSED
    ],
)
def test_a_family_is_refused_in_one_sentence_with_the_reason_in_its_row(tmp_path, one_rank, family):
    folder = tiny_folder(tmp_path / "model", family.model_type)
    named = rf"model\.path=.*: models of type {family.model_type}(_text)? [a-z].*\. Types that are tested: .*llama"
    with pytest.raises(ConfigError, match=named) as refused:
        trained(folder, one_rank, False)
    assert f" {family.refused}" in f" {refused.value}"
    if family.model_type not in ("nemotron", "stablelm"):  # these show with the weights in place
        with pytest.raises(ConfigError, match="Types that are tested"):
            check_architecture(Model(path=str(folder)), folder, 64)


def test_a_damaged_file_shows_before_any_worker_starts(tiny_folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    (copy / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        check_architecture(Model(path=str(copy)), copy, 64)


def test_dropout_in_a_config_drops_nothing(tmp_path, one_rank):
    folder = tiny_folder(tmp_path / "model", "seed_oss", residual_dropout=0.5)
    expected, _ = theirs(folder)
    torch.testing.assert_close(packed(trained(folder, one_rank, True), True), expected, rtol=0, atol=3e-6)


def test_a_head_that_the_config_ties_away_is_refused_and_the_rows_of_the_embedding_are_given(untied_folder, tmp_path):
    assert check_architecture(Model(path=str(untied_folder)), untied_folder, 64).embedding_rows == 320
    folder = shutil.copytree(untied_folder, tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(ConfigError, match=r"lm_head\.weight that differs from model\.embed_tokens\.weight"):
        check_architecture(Model(path=str(folder)), folder, 64)


# The critic's folder.


def checked_critic(folder):
    section = CriticModel(path=str(folder), trust_remote_code=False)
    return check_architecture(section, folder, 64)


@pytest.mark.parametrize("has_head", [False, True])
def test_a_critic_has_a_value_head_and_no_lm_head_whatever_its_folder_has(untied_folder, tmp_path, has_head):
    folder = with_value_head(untied_folder, tmp_path / "valued") if has_head else untied_folder
    policys = check_architecture(Model(path=str(untied_folder)), untied_folder, 64)
    expected = policys.weights | {"score.weight": (1, 64), "score.bias": (1,)}
    del expected["lm_head.weight"]
    assert checked_critic(folder)[:2] == (expected, policys.embedding_rows)


def test_a_critics_folder_that_cannot_be_trained_is_refused_under_the_critics_key(untied_folder, tmp_path):
    folder = tiny_folder(tmp_path / "mamba", "mamba")
    with pytest.raises(ConfigError, match=rf"^critic\.model\.path={folder}: models of type mamba"):
        checked_critic(folder)
    AutoModelForTokenClassification.from_pretrained(untied_folder, num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match=r"^critic\.model\.path=.*has 3 outputs"):
        checked_critic(tmp_path / "three")


def test_a_head_that_the_config_ties_away_does_not_matter_to_a_critic(untied_folder, tmp_path):
    folder = shutil.copytree(untied_folder, tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    assert checked_critic(folder).embedding_rows == 320
