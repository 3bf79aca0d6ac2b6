"""Every memory knob that a run on a CPU can turn, with the pairs of values that refuse each other, and rows that hold all others.

A factor is a knob, a level one of its values, an option (factor, level); the first level of each is off. A row has one level
of every factor.
"""

import importlib.util
import random
from functools import cache
from itertools import combinations

from verl_memopt.config.loader import settings_from_mapping

AR = "actor_rollout_ref"
MODEL, ACTOR, REF, ROLLOUT = (f"{AR}.{section}" for section in ("model", "actor", "ref", "rollout"))
OPTIM = f"{ACTOR}.optim"


def _levels(key, **values):
    """Return level -> what it sets, for levels that are values of one key."""
    return {level: {key: value} for level, value in values.items()}


def _of_roles(name, roles=("actor", "ref"), **values):
    """Return a factor for each role: ``<role> <name>``, a key of its sharding."""
    return {f"{role} {name}": _levels(f"{AR}.{role}.fsdp_config.{name}", **values) for role in roles}


def _log_probs(section):
    """Return the ways to batch the log-probs of a section."""
    by_tokens = f"{section}.log_prob_use_dynamic_bsz"
    return {
        "follows": {},
        "tokens": {by_tokens: True, f"{section}.log_prob_max_token_len_per_gpu": 30},
        "rows": {by_tokens: False, f"{section}.log_prob_micro_batch_size_per_gpu": 2},
    }


_ON_OFF = {"off": False, "on": True}
_DTYPES = {"fp32": "fp32", "bf16": "bfloat16"}
_CHECKPOINTING, _MODE = f"{MODEL}.enable_gradient_checkpointing", f"{MODEL}.gradient_checkpointing_mode"
_OFFLOAD = f"{MODEL}.enable_activation_offload"
_ONE_IN_FLIGHT = {"min_bytes": 1024, "in_flight": 1, "device_gb": 1e-6}
_ADAPTIVE = (f"{ACTOR}.adaptive_token_budget", *(f"{section}.log_prob_adaptive_token_budget" for section in (ROLLOUT, REF)))
_BY_TOKENS = f"{ACTOR}.use_dynamic_bsz"
_MASTERS = f"{ACTOR}.fsdp_config.model_dtype"
_SLEEP, _LEVEL = f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.sleep_level"
_SOME = {"lora_rank": 2, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "o_proj"], "exclude_modules": ["k_proj"]}
_LIMITS = tuple(f"memory.{memory}_limit_gb" for memory in ("device", "host", "pinned"))

FACTORS = {
    "chunk": _levels(f"{MODEL}.logprob_chunk_tokens", whole=0, **{"5": 5}),
    "vocabulary tile": _levels(f"{MODEL}.logprob_vocab_tile", auto=0, of_96=96),
    "recomputed values": _levels(f"{MODEL}.recompute_elementwise", **_ON_OFF),
    "last block": _levels(f"{MODEL}.prune_last_block", whole=False, pruned=True),
    "tiled mlp": {"off": {}, "3": {f"{MODEL}.tiled_mlp.enabled": True, f"{MODEL}.tiled_mlp.num_shards": 3}},
    "tiled block": {"off": {}, "5": {f"{MODEL}.block_tile_tokens": 5}},
    "checkpointing": {
        **_levels(_CHECKPOINTING, off=False, full=True),
        "every_n": {_CHECKPOINTING: True, _MODE: "every_n", f"{MODEL}.gradient_checkpointing_every": 2},
        "selective": {_CHECKPOINTING: True, _MODE: "selective"},
    },
    "activation offload": {
        "off": {},
        "on": {_OFFLOAD: True, f"{MODEL}.activation_offload_min_bytes": 64},
        "one in flight": {_OFFLOAD: True, **{f"{MODEL}.activation_offload_{key}": to for key, to in _ONE_IN_FLIGHT.items()}},
    },
    "shared prompt": _levels(f"{ACTOR}.use_prefix_grouper", **_ON_OFF),
    "batching": {
        "whole": {_BY_TOKENS: True},
        "tokens": {_BY_TOKENS: True, f"{ACTOR}.ppo_max_token_len_per_gpu": 20},
        "rows": {_BY_TOKENS: False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3},
    },
    "adaptive budget": {"fixed": dict.fromkeys(_ADAPTIVE, False), "learned": dict.fromkeys(_ADAPTIVE, True)},
    "old batching": _log_probs(ROLLOUT),
    "ref batching": _log_probs(REF),
    "optimizer": {"torch": {}, "torchao": {f"{OPTIM}.optimizer": "AdamW8bit", f"{OPTIM}.optimizer_impl": "torchao.optim"}},
    "bucket": _levels(f"{OPTIM}.bucket_megabytes", large=64, small=0.01),
    **_of_roles("optimizer_offload", roles=("actor",), **_ON_OFF),
    "state": _levels(f"{OPTIM}.state_dtype", follows=None, bf16="bfloat16", int8="int8", int4="int4"),
    "masters": {**_levels(_MASTERS, **_DTYPES), "rounded": {_MASTERS: "bfloat16", f"{OPTIM}.stochastic_rounding": True}},
    "in backward": _levels(f"{OPTIM}.in_backward", **_ON_OFF),
    "clip": _levels(f"{OPTIM}.clip_grad", one=1.0, none=None),
    **_of_roles("grad_offload", roles=("actor",), **_ON_OFF),
    **_of_roles("param_offload", **_ON_OFF),
    **_of_roles("offload_policy", **_ON_OFF),
    **_of_roles("reshard_after_forward", false=False, true=True, two=2),
    **_of_roles("fsdp_size", all=-1, one=1),
    **_of_roles("gradient_sync", roles=("actor",), last="last", every="every"),
    **_of_roles("own_units", **_ON_OFF),
    **_of_roles("dtype", **_DTYPES),
    **_of_roles("mixed_precision.reduce_dtype", roles=("actor",), **_DTYPES),
    **_of_roles("model_dtype", roles=("ref",), **_DTYPES),
    "lora": {**_levels(f"{MODEL}.lora_rank", off=0, all=4), "some": {f"{MODEL}.{key}": value for key, value in _SOME.items()}},
    "quantization": _levels(f"{REF}.quantization", none="none", int8="int8", nf4="nf4"),
    "sync": _levels(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", large=2048, one=1),
    "engine": {"awake": {_SLEEP: False}, **{f"level {level}": {_SLEEP: True, _LEVEL: level} for level in (1, 2)}},
    "engine rows": _levels(f"{ROLLOUT}.max_num_seqs", all=256, one=1),
    "load": _levels(f"{MODEL}.load_mode", stream="stream", mmap="mmap"),
    "limits": {"none": {}, "one": dict.fromkeys(_LIMITS, 1)},
    # Settings beside the knobs that change where something lies or how it is computed.
    **_of_roles("forward_prefetch", **_ON_OFF),
    **_of_roles("cuda_graphs", roles=("actor",), **_ON_OFF),
    "engine dtype": _levels(f"{ROLLOUT}.dtype", **_DTYPES),
}
"""Factor -> level -> what it sets."""

NEEDS = {
    ("load", "mmap"): {"ref param_offload": "on"},
    ("actor cuda_graphs", "on"): {"checkpointing": "full", "recomputed values": "on"},
}
"""Option -> what it only stands with, put beside it where a pair does not say otherwise."""

_KEYS = {
    "load": f"{MODEL}.load_mode",
    "lora": f"{MODEL}.lora_rank",
    "quantization": f"{REF}.quantization",
    "in backward": f"{OPTIM}.in_backward",
    "clip": f"{OPTIM}.clip_grad",
    "batching": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "adaptive budget": f"{ACTOR}.adaptive_token_budget",
    "optimizer": f"{OPTIM}.optimizer_impl",
    "masters": f"{OPTIM}.stochastic_rounding",
    "state": f"{OPTIM}.state_dtype",
}
"""Factor -> the key that names it in a refusal; another is one of the sharding of its role."""


def _key(factor):
    role, _, name = factor.partition(" ")
    return _KEYS.get(factor, f"{AR}.{role}.fsdp_config.{name}")


REFUSED = {
    frozenset([one, (factor, level)]): (_key(one[0]), _key(factor))
    for one, *others in (
        (("actor offload_policy", "on"), *((f"actor {each}_offload", "on") for each in ("param", "optimizer", "grad"))),
        (("ref offload_policy", "on"), ("ref param_offload", "on")),
        (("load", "mmap"), ("ref param_offload", "off"), ("ref offload_policy", "on"), ("lora", "all", "some")),
        (("load", "mmap"), ("quantization", "int8", "nf4")),
        (("lora", "all"), ("quantization", "int8", "nf4")),
        (("lora", "some"), ("quantization", "int8", "nf4")),
        (
            ("in backward", "on"),
            ("batching", "rows"),
            ("adaptive budget", "learned"),
            ("actor grad_offload", "on"),
        ),
        (("actor reshard_after_forward", "two"), ("actor fsdp_size", "one")),
        (("ref reshard_after_forward", "two"), ("ref fsdp_size", "one")),
        (("optimizer", "torchao"), ("in backward", "on"), ("masters", "rounded"), ("actor optimizer_offload", "on")),
        (("optimizer", "torchao"), ("actor grad_offload", "on")),
        (("optimizer", "torchao"), ("state", "bf16", "int8", "int4")),
    )
    for factor, *levels in others
    for level in levels
}
"""Two options that no run may have together -> the keys that the refusal names."""

REFUSED_LATER = {
    frozenset(pair): names
    for *pair, names in (
        (("in backward", "on"), ("batching", "tokens"), (f"{OPTIM}.in_backward", f"{ACTOR}.ppo_max_token_len_per_gpu")),
        (("load", "mmap"), ("ref model_dtype", "bf16"), (f"{MODEL}.load_mode", f"{REF}.fsdp_config.model_dtype")),
    )
}
"""The same for what only a batch or a file can tell: it loads, and is refused when the run comes to it."""

REFERENCE = ("ref ", "quantization", "load")
"""How the factors begin that say something of the reference alone."""

NO_FACTOR = {
    f"{OPTIM}.override_optimizer_config": "any arguments; every run here gives one",
    f"{OPTIM}.momentum": "of SGD, whose own tests combine it with the other knobs of the update",
    f"{ACTOR}.fsdp_config.split_master_weights": "for one precision alone; its own tests combine it",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": "needs several devices, and combinations are tried on one",
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size": "needs several devices, and combinations are tried on one",
    f"{REF}.fsdp_config.mixed_precision.reduce_dtype": "a reference has no gradients",
    f"{MODEL}.lora_adapter_path": "names a file to start from",
    f"{MODEL}.use_rslora": "another scale of the same adapters",
    f"{MODEL}.target_parameters": "of mixtures alone; their own tests combine it",
    f"{REF}.adapter": "needs such a file",
    f"{MODEL}.quantization": "for adapters alone, on a base that is whole; its own tests combine it",
    f"{ROLLOUT}.share_weights": "of an engine beside the trainer; its own tests combine it",
    f"{ROLLOUT}.gpu_memory_utilization": "of vLLM alone",
    f"{ROLLOUT}.kv_cache_memory_gb": "of vLLM alone",
    f"{ROLLOUT}.max_num_batched_tokens": "of vLLM alone",
    f"{ROLLOUT}.enforce_eager": "of vLLM alone",
    f"{ROLLOUT}.enable_prefix_caching": "of vLLM alone",
    f"{ROLLOUT}.kv_cache_dtype": "of vLLM alone",
    f"{ROLLOUT}.max_model_len": "a check of lengths, where no cache is made ahead",
    "memory.card_gb": "a check before the start",
}
"""Keys of knobs that are no factor, and why."""

FOUR_RANKS = {("actor reshard_after_forward", "two"), ("ref reshard_after_forward", "two")}
"""Options that no group of one or two ranks can have."""


LOSSY = (
    *("optimizer", "state", "masters", "clip", "actor dtype", "ref dtype", "actor mixed_precision.reduce_dtype"),
    *("ref model_dtype", "lora", "quantization", "engine dtype"),
)
"""Factors that change what is computed. All others change where it lies and in which order it is summed."""

STREAMS = ("bucket", "in backward", "actor optimizer_offload", "actor grad_offload", "actor fsdp_size")
"""Factors that decide which element draws which random number, where updates are rounded by chance."""


def options(factors=FACTORS):
    """Yield every option of every factor."""
    return [(factor, level) for factor, levels in factors.items() for level in levels]


def pairs(factors=FACTORS):
    """Return every two options of different factors."""
    return [frozenset(pair) for pair in combinations(options(factors), 2) if pair[0][0] != pair[1][0]]


def runnable():
    """Return the factors with the levels that a run of one or two ranks can have with the installed packages."""
    absent = set(FOUR_RANKS)
    if importlib.util.find_spec("torchao") is None:
        absent.add(("optimizer", "torchao"))
    return {factor: [level for level in levels if (factor, level) not in absent] for factor, levels in FACTORS.items()}


def lossless():
    """Return the factors with the levels that do not change the numbers of a run, except that it may not clip."""
    off = all_off()
    return {factor: [off[factor]] if factor in LOSSY and factor != "clip" else levels for factor, levels in runnable().items()}


def all_off():
    """Return the row with every knob off."""
    return {factor: next(iter(levels)) for factor, levels in FACTORS.items()}


def pair_row(pair):
    """Return the row with only a pair, and what the pair needs, switched on."""
    needed = [item for option in sorted(pair) for item in NEEDS.get(option, {}).items()]
    return all_off() | dict(needed) | dict(pair)


def runnable_pairs(factors):
    """Return every pair of these levels that a run of one or two ranks must support."""
    return set(pairs(factors)) - REFUSED.keys() - REFUSED_LATER.keys()


@cache
def covering_rows():
    """Return two lists of rows: one covers every pair of lossless options and has no others, the other covers all other pairs."""
    exact = _covering(lossless(), set())
    return exact, _covering(runnable(), set().union(*map(tried_pairs, exact)))


def _covering(factors, tried, tries=20):
    """Return rows that cover every pair not in ``tried``: each is the best of ``tries`` random rows, by newly covered pairs."""
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
    """Complete a row: each further factor gets the level with most uncovered pairs, ties by chance."""
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
    """Return the pairs that a row covers. With LoRA no reference is built, so its options have no effect."""
    acts = [option for option in row.items() if row["lora"] == "off" or not option[0].startswith(REFERENCE)]
    idle = [option for option in row.items() if option not in acts]
    return set(map(frozenset, combinations(acts, 2))) | {frozenset([option, ("lora", row["lora"])]) for option in idle}


def settings_of(row, folder, devices, more=None):
    """Return the settings of a row on some devices, with ``more`` on top. Raises ConfigError if its options do not combine."""
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
    """Return the row with only the lossy options of ``row`` switched on."""
    by_chance = row["masters"] == "rounded" or row["state"] in ("bf16", "int8", "int4")
    kept = LOSSY + (STREAMS if by_chance else ())
    return all_off() | {factor: row[factor] for factor in kept}
