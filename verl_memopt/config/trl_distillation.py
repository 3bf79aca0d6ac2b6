"""Names of TRL's distillation trainers: our keys, and how values are converted.

Source: ``DistillationConfig``, and the configs of GKD, GOLD, SDFT and the server teacher in ``trl.experimental``, of TRL 1.16.
tests/trl/test_distillation.py shows that both give equal divergences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl_memopt.config.spelling import (
    DISTILL,
    NotConvertibleError,
    Spelling,
    TrlSettings,
    Values,
    copied,
    effective,
    unless_none,
)

PATH, PROMPT = "teacher.model.path", "distill.teacher_prompt"
DIVERGENCE, BETA, TOP_K = "distill.divergence", "distill.beta", "distill.top_k"
WEIGHTS, AGG_MODE = "teacher.weights", "actor_rollout_ref.actor.loss_agg_mode"
_FOLLOWS = tuple(f"actor_rollout_ref.ref.sync_{name}" for name in ("every_steps", "mixup_alpha"))
_OWN_TEXTS = "docs/sft.md shows how a teacher writes responses, and how they are learned"


def _divergence(name: str, value: Any) -> dict[str, Any]:
    # TRL's number is the teacher's share of the mixture, as `distill.beta`. At 0 and 1 TRL takes the KLs, which are no limits of
    # the JSD.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise NotConvertibleError("TRL has numbers from 0 to 1", f"Choose one, or set {DIVERGENCE}.", (name,))
    if value in (0, 1):
        return {DIVERGENCE: "reverse_kl" if value else "forward_kl"}
    return {DIVERGENCE: "jsd", BETA: value}


def divergence(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    return {} if trl[name] is None else _divergence(name, trl[name])


def own_responses(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    if trl[name] in (None, 1):
        return {}
    what = "in other steps TRL learns from responses of the dataset or the teacher; here the policy always samples them"
    way_out = "Set lmbda=1.0. For the dataset's responses use algorithm.adv_estimator=sft with distill.coef (docs/distill.md)."
    raise NotConvertibleError(what, way_out)


def texts_of_teacher(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    if trl[name] and trl.get("lmbda") != 1:  # at lmbda=1 TRL never reads it
        raise NotConvertibleError("a teacher does not sample during a run", f"Set it to false. {_OWN_TEXTS}.")
    return {}


def most_probable(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # TRL's tail is our one entry for all other tokens.
    if not trl[name]:
        return {TOP_K: None}
    if trl.get("loss_add_tail") is False:
        what = "without a tail TRL leaves the other tokens out; here they count as one"
        raise NotConvertibleError(what, "Set loss_add_tail=true.", (name, "loss_add_tail"))
    if effective(DIVERGENCE, values) != "forward_kl":
        what = "only for beta=0 TRL takes the teacher's most probable tokens"
        raise NotConvertibleError(what, f"Set beta=0, or {TOP_K} beside a KL.")
    return {TOP_K: trl[name]}


def self_distilled(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Combine TRL's two names. SDFT and SDPO average over the tokens of each response first.
    mode, alpha = trl.get("distillation_mode") or "topk_logits", trl.get("distillation_alpha")
    mean = {AGG_MODE: "seq-mean-token-mean"}
    if mode == "full_logits":
        return mean | _divergence("distillation_alpha", 0.5 if alpha is None else alpha)
    if mode == "sampled_token":
        if alpha not in (None, 1):
            raise NotConvertibleError("TRL has no other divergence for the sampled token", "Set distillation_alpha=1.0.")
        return mean | {DIVERGENCE: "sampled"}
    both = ("distillation_mode",) if "distillation_mode" in trl else (name,)
    what = "TRL then compares the policy's most probable tokens; here it is all tokens, or the teacher's most probable ones"
    raise NotConvertibleError(what, f"Set distillation_mode=full_logits, or {TOP_K} beside our {DIVERGENCE}.", both)


def ratio_weights(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    from verl_memopt.config.trl_names import updates_per_rollout

    if trl[name] is None or updates_per_rollout(values) == 1:  # every ratio is 1 then
        return {}
    what = "after the first optimizer step of a rollout TRL weighs each token by the ratio of the policies; here it has no weight"
    raise NotConvertibleError(what, "Set it to null, or take one optimizer step per rollout.")


def kind_of_teacher(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Combine TRL's three names. The reference has the weights that training started from, and may follow the policy.
    from verl_memopt.config.aliases import is_count
    from verl_memopt.config.trl_names import SYNC_ALPHA, SYNC_EVERY, updates_per_rollout

    kind = trl.get("teacher_model_kind") or "base"
    if kind not in ("live", "base", "ema"):
        raise NotConvertibleError("TRL has live, base and ema", "Choose one.", ("teacher_model_kind",))
    if kind != "ema" or name != "teacher_model_kind":
        return {WEIGHTS: "policy" if kind == "live" else "reference"} if name == "teacher_model_kind" else {}
    steps, rate = trl.get("teacher_sync_steps"), trl.get("teacher_update_rate")
    distance, updates = (1 if steps is None else steps), updates_per_rollout(values)
    if not is_count(distance) or distance % updates:
        what = f"a training step takes {updates} optimizer steps, and {distance} is not a multiple"
        raise NotConvertibleError(what, f"Set {SYNC_EVERY}, in training steps.", ("teacher_sync_steps",))
    return {WEIGHTS: "reference", SYNC_EVERY: distance // updates, SYNC_ALPHA: 0.05 if rate is None else rate}


def teacher_names(arguments: Callable[[Mapping[str, Any], Mapping[str, str]], dict[str, Any]]) -> tuple[Spelling, ...]:
    """Return the records. ``arguments`` converts arguments of ``from_pretrained``, given our keys for them."""
    keys = {
        "dtype": "teacher.fsdp_config.model_dtype", "quantization": "teacher.quantization",
        "trust": "teacher.model.trust_remote_code", "override": "teacher.model.override_config",
    }  # fmt: skip

    def loading(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
        return arguments(trl[name] or {}, keys)

    alpha = "TRL's 0 is the KL from the teacher to the policy, and 1 the KL from the policy to the teacher"
    averaged = "the mean is over the tokens of each response, then over responses"
    return (
        Spelling(("teacher_model_name_or_path",), (PATH,), unless_none(PATH), "", DISTILL),
        Spelling(
            ("teacher_model_init_kwargs",), (keys["dtype"], keys["quantization"]), loading,
            "dtype is the dtype of the stored weights", DISTILL,
        ),
        Spelling(("beta",), (DIVERGENCE, BETA), divergence, alpha, DISTILL),
        Spelling(("lmbda",), (), own_responses, "only 1 is read: the policy samples all responses", DISTILL),
        Spelling(("seq_kd",), (), texts_of_teacher, "only false is read, or any value with lmbda=1", DISTILL),
        Spelling(("loss_top_k",), (TOP_K,), most_probable, "it needs beta=0 and loss_add_tail=true", DISTILL),
        Spelling(("distillation_mode",), (DIVERGENCE, BETA, AGG_MODE), self_distilled, f"{averaged}; not topk_logits", DISTILL),
        Spelling(("distillation_alpha",), (DIVERGENCE, BETA, AGG_MODE), self_distilled, f"{alpha}; {averaged}", DISTILL),
        Spelling(("distillation_is_clip",), (), ratio_weights, "with one optimizer step per rollout it changes nothing", DISTILL),
        *(
            Spelling((kind,), (WEIGHTS, *_FOLLOWS), kind_of_teacher, note, DISTILL)
            for kind, note in (
                ("teacher_model_kind", "live is the policy itself, base the start of training, ema a copy that follows it"),
                ("teacher_update_rate", "it needs teacher_model_kind=ema"),
                ("teacher_sync_steps", "it needs teacher_model_kind=ema"),
            )
        ),
        Spelling(
            ("teacher_prompt_template",), (PROMPT,), copied(PROMPT), "its names in braces are columns, as privileged_context",
            DISTILL,
        ),
    )  # fmt: skip


WITHOUT_EQUAL: tuple[tuple[str, tuple[Any, ...] | None, str], ...] = (
    ("teacher_model_revision", ("main",), f"a folder has one revision. Use {PATH} with the folder of that revision"),
    ("teacher_model_server_url", (), "another key decides. Use teacher.endpoint.url"),
    ("use_teacher_server", (False,), "the engine of the policy gives no log-probs of a teacher. Set false"),
    ("loss_add_tail reverse_kl_top_1_mode", None, "it belongs to loss_top_k"),
    ("distillation_topk distillation_add_tail", None, "it belongs to distillation_mode=topk_logits"),
    ("generate_from_teacher", (False,), f"the policy samples at its own prompt. {_OWN_TEXTS}"),
    ("num_loss_tokens_to_skip", (0,), "all tokens of a response are learned. Set 0"),
    ("use_uld_loss", (False,), "this loss sorts probabilities. For a teacher with another tokenizer set distill.align=text"),
    ("teacher_tokenizer_name_or_path uld_token_merge_strategy use_extended_uld uld_use_hybrid_loss uld_hybrid_matched_weight "
     "uld_hybrid_unmatched_weight uld_crossentropy_weight uld_distillation_weight uld_student_temperature "
     "uld_teacher_temperature uld_skip_student_eos uld_skip_teacher_eos", None, "it belongs to use_uld_loss"),
    ("vllm_sync_frequency", (1,), "the engine gets the weights after every step. Set 1"),
    ("log_completions_steps wandb_log_unique_prompts", None, "samples are written to the run folder, each with its prompt"),
    ("callbacks", ([],), "callbacks are an argument of the trainer"),
    ("chat_template_path", (), "the model's tokenizer has the template. Use actor_rollout_ref.model.tokenizer_path"),
    ("eos_token pad_token", (), "the model's folder says which tokens end a response, and nothing is padded. Remove the key"),
    ("dataset_text_field dataset_kwargs dataset_num_proc", None, "rows have a prompt. Use data.prompt_key for another column"),
    ("truncation_mode", None, "a longer prompt is an error. Use data.truncation"),
    ("packing eval_packing padding_free", (True, False), "sequences are always packed, and never see each other"),
    ("packing_strategy", None, "sequences are packed by tokens"),
    ("completion_only_loss", (True,), "only responses are learned. Remove the key"),
    ("assistant_only_loss", (True, False), "only responses are learned"),
    ("activation_offloading", (False,), "another key decides. Use actor_rollout_ref.model.enable_activation_offload"),
)  # fmt: skip
"""(names, separated by spaces; values that pass, None = any; reason and way out)."""
