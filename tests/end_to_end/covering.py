"""Every memory knob that a run on a CPU can turn, with the pairs of values that refuse each other, and rows that hold all others.

A factor is a knob, a level one of its values, an option (factor, level); the first level of each is off. A row has one level
of every factor.
"""

import importlib.util
import random
from itertools import combinations

from verl_memopt.config.loader import settings_from_mapping

AR = "actor_rollout_ref"
MODEL, ACTOR, REF, ROLLOUT = (f"{AR}.{section}" for section in ("model", "actor", "ref", "rollout"))
FSDP, REF_FSDP, OPTIM = f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", f"{ACTOR}.optim"
CHECKPOINTING = f"{MODEL}.enable_gradient_checkpointing"


def _switch(key, **levels):
    return {name: {key: value} for name, value in levels.items()}


def _scoring(section):
    """Gives how a pass that only scores cuts its rows: as the update does, or in its own way."""
    by_tokens, tokens, rows = (f"{section}.log_prob_{key}" for key in _SCORING)
    return {"follows": {}, "tokens": {by_tokens: True, tokens: 30}, "rows": {by_tokens: False, rows: 2}}


_SCORING = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")


def _fsdp(key, roles=(FSDP, REF_FSDP), **levels):
    """Gives one factor a role, so that policy and reference may differ."""
    names = {FSDP: "actor", REF_FSDP: "ref"}
    return {f"{names[role]} {key}": _switch(f"{role}.{key}", **levels) for role in roles}


FACTORS = {
    "chunk": {"whole": {f"{MODEL}.logprob_chunk_tokens": 0}, "5": {f"{MODEL}.logprob_chunk_tokens": 5}},
    "vocabulary tile": _switch(f"{MODEL}.logprob_vocab_tile", auto=0, of_96=96),
    "checkpointing": {
        "off": {CHECKPOINTING: False},
        "full": {CHECKPOINTING: True},
        "every_n": {
            CHECKPOINTING: True,
            f"{MODEL}.gradient_checkpointing_mode": "every_n",
            f"{MODEL}.gradient_checkpointing_every": 2,
        },
        "selective": {CHECKPOINTING: True, f"{MODEL}.gradient_checkpointing_mode": "selective"},
    },
    "activation offload": {
        "off": {},
        "on": {f"{MODEL}.enable_activation_offload": True, f"{MODEL}.activation_offload_min_bytes": 64},
        "one in flight": {
            f"{MODEL}.enable_activation_offload": True,
            f"{MODEL}.activation_offload_min_bytes": 1024,
            f"{MODEL}.activation_offload_in_flight": 1,
        },
    },
    "recomputed values": _switch(f"{MODEL}.recompute_elementwise", off=False, on=True),
    "last block": _switch(f"{MODEL}.prune_last_block", whole=False, pruned=True),
    "tiled mlp": {"off": {}, "3": {f"{MODEL}.tiled_mlp.enabled": True, f"{MODEL}.tiled_mlp.num_shards": 3}},
    "batching": {
        "whole": {f"{ACTOR}.use_dynamic_bsz": True},
        "tokens": {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 20},
        "rows": {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3},
    },
    "shared prompt": _switch(f"{ACTOR}.use_prefix_grouper", off=False, on=True),
    "old batching": _scoring(ROLLOUT),
    "ref batching": _scoring(REF),
    **_fsdp("param_offload", off=False, on=True),
    **_fsdp("offload_policy", off=False, on=True),
    **_fsdp("optimizer_offload", (FSDP,), off=False, on=True),
    **_fsdp("reshard_after_forward", false=False, true=True, two=2),
    **_fsdp("own_units", off=False, on=True),
    **_fsdp("fsdp_size", all=-1, one=1),
    **_fsdp("gradient_sync", (FSDP,), last="last", every="every"),
    **_fsdp("forward_prefetch", off=False, on=True),
    **_fsdp("dtype", fp32="fp32", bf16="bfloat16"),
    **_fsdp("mixed_precision.reduce_dtype", (FSDP,), fp32="fp32", bf16="bfloat16"),
    **_fsdp("model_dtype", (REF_FSDP,), fp32="fp32", bf16="bfloat16"),
    "masters": {
        "fp32": {f"{FSDP}.model_dtype": "fp32"},
        "bf16": {f"{FSDP}.model_dtype": "bfloat16"},
        "rounded": {f"{FSDP}.model_dtype": "bfloat16", f"{OPTIM}.stochastic_rounding": True},
    },
    "state": _switch(f"{OPTIM}.state_dtype", follows=None, bf16="bfloat16", int8="int8", int4="int4"),
    "in backward": _switch(f"{OPTIM}.in_backward", off=False, on=True),
    "clip": _switch(f"{OPTIM}.clip_grad", one=1.0, none=None),
    "optimizer": {"torch": {}, "torchao": {f"{OPTIM}.optimizer": "AdamW8bit", f"{OPTIM}.optimizer_impl": "torchao.optim"}},
    "bucket": _switch(f"{OPTIM}.bucket_megabytes", large=64, small=0.01),
    "lora": {
        "off": {f"{MODEL}.lora_rank": 0},
        "all": {f"{MODEL}.lora_rank": 4},
        "some": {
            f"{MODEL}.lora_rank": 2,
            f"{MODEL}.lora_alpha": 8,
            f"{MODEL}.target_modules": ["q_proj", "k_proj", "o_proj"],
            f"{MODEL}.exclude_modules": ["k_proj"],
        },
    },
    "quantization": _switch(f"{REF}.quantization", none="none", int8="int8", nf4="nf4"),
    "load": _switch(f"{MODEL}.load_mode", stream="stream", mmap="mmap"),
    "sync": _switch(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", large=2048, one=1),
    "engine": {
        "awake": {f"{ROLLOUT}.free_cache_engine": False},
        "level 1": {f"{ROLLOUT}.free_cache_engine": True, f"{ROLLOUT}.sleep_level": 1},
        "level 2": {f"{ROLLOUT}.free_cache_engine": True, f"{ROLLOUT}.sleep_level": 2},
    },
    "engine rows": _switch(f"{ROLLOUT}.max_num_seqs", all=256, one=1),
    "engine dtype": _switch(f"{ROLLOUT}.dtype", fp32="fp32", bf16="bfloat16"),
    "limits": {"none": {}, "one": dict.fromkeys((f"memory.{part}_limit_gb" for part in ("device", "host", "pinned")), 1)},
}
"""Factor -> level -> what it sets."""

NEEDS = {
    ("load", "mmap"): {"ref param_offload": "on"},
    ("in backward", "on"): {"clip": "none"},
}
"""Option -> what it only stands with, put beside it where a pair does not say otherwise."""

ON_ITS_OWN = f"{OPTIM}.optimizer_impl"
REFUSED = {
    frozenset(pair): names
    for *pair, names in (
        (("actor offload_policy", "on"), ("actor param_offload", "on"), (f"{FSDP}.offload_policy", f"{FSDP}.param_offload")),
        (
            ("actor offload_policy", "on"),
            ("actor optimizer_offload", "on"),
            (f"{FSDP}.offload_policy", f"{FSDP}.optimizer_offload"),
        ),
        (("ref offload_policy", "on"), ("ref param_offload", "on"), (f"{REF_FSDP}.offload_policy", f"{REF_FSDP}.param_offload")),
        (("load", "mmap"), ("ref param_offload", "off"), (f"{MODEL}.load_mode", f"{REF_FSDP}.param_offload")),
        (("load", "mmap"), ("ref offload_policy", "on"), (f"{MODEL}.load_mode", f"{REF_FSDP}.offload_policy")),
        (("load", "mmap"), ("lora", "all"), (f"{MODEL}.load_mode", f"{MODEL}.lora_rank")),
        (("load", "mmap"), ("lora", "some"), (f"{MODEL}.load_mode", f"{MODEL}.lora_rank")),
        (("load", "mmap"), ("quantization", "int8"), (f"{MODEL}.load_mode", f"{REF}.quantization")),
        (("load", "mmap"), ("quantization", "nf4"), (f"{MODEL}.load_mode", f"{REF}.quantization")),
        (("lora", "all"), ("quantization", "int8"), (f"{MODEL}.lora_rank", f"{REF}.quantization")),
        (("lora", "some"), ("quantization", "int8"), (f"{MODEL}.lora_rank", f"{REF}.quantization")),
        (("lora", "all"), ("quantization", "nf4"), (f"{MODEL}.lora_rank", f"{REF}.quantization")),
        (("lora", "some"), ("quantization", "nf4"), (f"{MODEL}.lora_rank", f"{REF}.quantization")),
        (("in backward", "on"), ("clip", "one"), (f"{OPTIM}.in_backward", f"{OPTIM}.clip_grad")),
        (("in backward", "on"), ("batching", "rows"), (f"{OPTIM}.in_backward", f"{ACTOR}.ppo_micro_batch_size_per_gpu")),
        (
            ("actor reshard_after_forward", "two"),
            ("actor fsdp_size", "one"),
            (f"{FSDP}.reshard_after_forward", f"{FSDP}.fsdp_size"),
        ),
        (
            ("ref reshard_after_forward", "two"),
            ("ref fsdp_size", "one"),
            (f"{REF_FSDP}.reshard_after_forward", f"{REF_FSDP}.fsdp_size"),
        ),
        (("optimizer", "torchao"), ("in backward", "on"), (ON_ITS_OWN, f"{OPTIM}.in_backward")),
        (("optimizer", "torchao"), ("masters", "rounded"), (ON_ITS_OWN, f"{OPTIM}.stochastic_rounding")),
        (("optimizer", "torchao"), ("actor optimizer_offload", "on"), (ON_ITS_OWN, f"{FSDP}.optimizer_offload")),
        (("optimizer", "torchao"), ("state", "bf16"), (ON_ITS_OWN, f"{OPTIM}.state_dtype")),
        (("optimizer", "torchao"), ("state", "int8"), (ON_ITS_OWN, f"{OPTIM}.state_dtype")),
        (("optimizer", "torchao"), ("state", "int4"), (ON_ITS_OWN, f"{OPTIM}.state_dtype")),
    )
}
"""Two options that no run may have together -> the keys that the refusal names."""

REFUSED_LATER = {
    frozenset(pair): names
    for *pair, names in (
        (("in backward", "on"), ("batching", "tokens"), (f"{OPTIM}.in_backward", f"{ACTOR}.ppo_max_token_len_per_gpu")),
        (("load", "mmap"), ("ref model_dtype", "bf16"), (f"{MODEL}.load_mode", f"{REF_FSDP}.model_dtype")),
    )
}
"""The same for what only a batch or a file can tell: it loads, and is refused when the run comes to it."""

REFERENCE = ("ref ", "quantization", "load")
"""How the factors begin that say something of the reference alone."""

NO_FACTOR = {
    **dict.fromkeys(
        (
            f"{ROLLOUT}.{key}"
            for key in (
                *("gpu_memory_utilization", "kv_cache_memory_gb", "kv_cache_dtype", "max_num_batched_tokens"),
                *("enforce_eager", "enable_prefix_caching"),
            )
        ),
        "of vLLM alone",
    ),
    f"{ROLLOUT}.max_model_len": "a check of lengths, where no cache is made ahead",
    f"{OPTIM}.override_optimizer_config": "any arguments; every run here gives one",
    f"{MODEL}.lora_adapter_path": "names a file to start from",
    f"{REF_FSDP}.mixed_precision.reduce_dtype": "a reference has no gradients",
}
"""Keys of knobs that are no factor, and why."""

FOUR_RANKS = {("actor reshard_after_forward", "two"), ("ref reshard_after_forward", "two")}
"""Options that no group of one or two ranks can have."""


LOSSY = (
    *("actor dtype", "actor mixed_precision.reduce_dtype", "masters", "state", "clip", "optimizer", "lora"),
    *("ref dtype", "ref model_dtype", "quantization", "engine dtype"),
)
"""Factors that change what is computed. All others change where it lies and in which order it is summed."""

STREAMS = ("bucket", "in backward", "actor optimizer_offload", "actor fsdp_size")
"""Factors that decide which element draws which random number, where updates are rounded by chance."""


def options(factors=FACTORS):
    """Gives every option, factor by factor."""
    return [(factor, level) for factor, levels in factors.items() for level in levels]


def pairs(factors=FACTORS):
    """Gives every two options of different factors."""
    return [frozenset(pair) for pair in combinations(options(factors), 2) if pair[0][0] != pair[1][0]]


def runnable():
    """Gives the factors with the levels that a run of one or two ranks can have with what is installed."""
    absent = set(FOUR_RANKS)
    if importlib.util.find_spec("torchao") is None:
        absent.add(("optimizer", "torchao"))
    return {factor: [level for level in levels if (factor, level) not in absent] for factor, levels in FACTORS.items()}


def lossless():
    """Gives the factors with the levels under which a run computes what it would without them, or only does not clip."""
    off = all_off()
    return {factor: [off[factor]] if factor in LOSSY and factor != "clip" else levels for factor, levels in runnable().items()}


def all_off():
    """Gives the row in which every knob is off."""
    return {factor: next(iter(levels)) for factor, levels in FACTORS.items()}


def pair_row(pair):
    """Gives the row in which a pair, and what it needs, is all that is on."""
    needed = [item for option in sorted(pair) for item in NEEDS.get(option, {}).items()]
    return all_off() | dict(needed) | dict(pair)


def runnable_pairs(factors):
    """Gives every pair of these levels that a run of one or two ranks must be able to have."""
    return set(pairs(factors)) - REFUSED.keys() - REFUSED_LATER.keys()


def covering_rows():
    """Gives (rows that try out every pair of lossless options and have no others, rows that try out all other pairs)."""
    exact = _covering(lossless(), set())
    return exact, _covering(runnable(), set().union(*map(tried_pairs, exact)))


def _covering(factors, tried, tries=20):
    """Gives rows for every pair not ``tried`` yet: each the best of some ``tries``, by the pairs that no row before it has."""
    missing, rows, order = runnable_pairs(factors) - tried, [], random.Random(0)
    while missing:
        partners = {option: set() for option in options(factors)}
        for one, other in missing:
            partners[one].add(other)
            partners[other].add(one)
        # Sorted, because a set's own order changes from process to process, and ranks must agree.
        first = min(missing, key=sorted)
        begun = [_filled(dict(first), factors, partners, order) for _ in range(tries)]
        rows.append(max(begun, key=lambda row: len(missing & tried_pairs(row))))
        missing -= tried_pairs(rows[-1])
    return rows


def _filled(row, factors, partners, order):
    """Gives a row begun: at each further factor the level that has most partners in it; chance decides the rest."""
    left = [factor for factor in factors if factor not in row]
    order.shuffle(left)
    chosen = set(row.items())
    for factor in left:
        stand = [level for level in factors[factor] if chosen.isdisjoint(_REFUSERS[factor, level])]
        brings = [len(partners[factor, level] & chosen) for level in stand]
        row[factor] = order.choice([level for level, brought in zip(stand, brings, strict=True) if brought == max(brings)])
        chosen.add((factor, row[factor]))
    return {factor: row[factor] for factor in factors}


_REFUSERS = {
    option: {other for pair in (*REFUSED, *REFUSED_LATER) if option in pair for other in pair - {option}} for option in options()
}


def tried_pairs(row):
    """Gives the pairs that a row tries out: with LoRA no reference of its own is built, and its options do nothing."""
    acts = [option for option in row.items() if row["lora"] == "off" or not option[0].startswith(REFERENCE)]
    idle = [option for option in row.items() if option not in acts]
    return set(map(frozenset, combinations(acts, 2))) | {frozenset([option, ("lora", row["lora"])]) for option in idle}


def settings_of(row, folder, devices, more=None):
    """Gives the settings of a row on some devices, ``more`` on top. Errors: ConfigError where its options do not combine."""
    least = {
        "data.train_files": "none",
        "data.val_files": None,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 8,
        "data.max_response_length": 8,
        "algorithm.adv_estimator": "rloo",
        f"{MODEL}.path": str(folder),
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.1,
        f"{ACTOR}.entropy_coeff": 0.01,
        f"{OPTIM}.lr": 1e-3,
        # Updates as smooth as gradients: with 1e-8 an element whose gradient is all rounding would take a whole step.
        f"{OPTIM}.override_optimizer_config": {"eps": 1e-3},
        f"{ROLLOUT}.name": "hf",
        f"{ROLLOUT}.n": 4,
        "trainer.n_gpus_per_node": devices,
        "trainer.track_memory_every_steps": 0,
    }
    chosen = {key: value for factor, level in row.items() for key, value in FACTORS[factor][level].items()}
    return settings_from_mapping(least | chosen | (more or {}))


def reference_of(row):
    """Gives the row in which what is lossy in ``row`` is all that is on."""
    by_chance = row["masters"] == "rounded" or row["state"] in ("int8", "int4")
    kept = LOSSY + (STREAMS if by_chance else ())
    return all_off() | {factor: row[factor] for factor in kept}
