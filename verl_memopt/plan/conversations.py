"""The passes over conversations, for the byte formulas: of a forest whose shape is known, and the most that a run may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, TypeAlias

from verl_memopt.config.schema import Settings
from verl_memopt.memory.knob import SequenceRole, longest_sample, sequence_ranks
from verl_memopt.memory.token_budget import Role, sizes_of
from verl_memopt.model.forest import Forest
from verl_memopt.model.open_path import OpenPack, RunPack, path_packs
from verl_memopt.model.packing import Pack, pack_forest
from verl_memopt.model.prefix_layout import PrefixSpan
from verl_memopt.plan.formulas import ForestWork, Pass

AnyRole: TypeAlias = Role | Literal["critic"]

_BY_TOKENS = "actor_rollout_ref.actor.use_dynamic_bsz"


def forest_passes(forest: Forest, budget: int, learns: bool = True, alone: bool = False) -> list[Pass]:
    """Return the passes of a micro-batch over a forest: one, or several that keep a path open.

    They depend only on the shape of the forest: the sizes and parents of its nodes, and the sampled places.

    Args:
        forest: The nodes that the rows of the micro-batch need (:meth:`Forest.select`).
        budget: Most tokens of a pass.
        learns: The passes of an update. False = those of a pass for log-probs.
        alone: As in :class:`Pass`.
    """
    pack = pack_forest(forest.tokens, forest.sizes, forest.parent, forest.place, [len(forest.place)])
    tokens = pack.input_ids.shape[1]
    if tokens <= budget:
        return [_pass(pack, tokens, alone=alone)]
    steps, passes, opened, summed = path_packs(forest, budget), list[Pass](), list[Pack](), 0
    everything = sum(step.pack.input_ids.shape[1] for step in steps if isinstance(step, OpenPack | RunPack))
    for step in steps:
        if isinstance(step, RunPack):
            passes.append(_pass(step.pack, everything, opened, summed=summed))
            summed = len(opened) if learns else 0
        elif isinstance(step, OpenPack):
            passes.append(_pass(step.pack, everything, opened, step.pack, summed, opens=True))
            opened.append(step.pack)
        else:
            part = opened.pop()
            if learns:
                passes.append(_pass(part, everything, opened, part, len(opened) + 1, closes=True))
            summed = min(summed, len(opened))
    return passes


# What a run may have. Its settings bound the tokens of a conversation and of a micro-batch, but not the tokens of a turn.


def most_turns(settings: Settings) -> int | None:
    """Return the largest number of turns of a conversation; None = any number, and 1 if each prompt has one answer."""
    rollout = settings.actor_rollout_ref.rollout
    return rollout.multi_turn.max_assistant_turns if rollout.converses else 1


def conversation_passes(settings: Settings, role: AnyRole, work: Pass) -> list[Pass]:
    """Return the passes of conversations that may need most, besides a pass of the same size without forks (``work``)."""
    tokens, twice = work.tokens, (work.tokens, 2 * work.tokens)  # a round has at most twice the keys of the pack
    one = ForestWork(0, tokens, (tokens, tokens), twice, sums_many=True)
    packs = [replace(work, forest=replace(one, skipped=left)) for left in {0, tokens - work.responses}]
    path = open_tokens(settings, role)
    if not path:
        return packs
    # Tokens that were sampled in open nodes are learned in the next pass.
    reads = replace(
        one,
        span=(tokens, path),
        round=(tokens, 2 * (path + tokens)),
        read=path,
        copied=_parts(settings, tokens) * (path + tokens),
        held=path,
        summed=path,
        states=path,
    )
    closes = ForestWork(0, path, (0, 0), (0, 0), held=path, summed=path, states=path, closes=True)
    below = replace(work, responses=tokens + path, all_tokens=work.all_tokens + path, prefix=0, alone=False)
    trained = role in ("actor", "critic")
    closing = [replace(below, tokens=path, responses=0, rows=1, forest=closes)] if trained else []
    return [*packs, replace(below, forest=reads if trained else replace(reads, summed=0)), *closing]


def open_tokens(settings: Settings, role: AnyRole) -> int:
    """Return the most tokens of a path that is kept open for conversations longer than a micro-batch; 0 = there are none."""
    _, by_tokens, most = sizes_of(settings, role)
    model = settings.critic.model if role in ("values", "critic") else settings.actor_rollout_ref.model
    turns, response, longest = most_turns(settings), settings.data.max_response_length, longest_sample(settings)
    is_longer = turns is None or longest + (turns - 1) * response > (most or 0)
    in_backward = settings.actor_rollout_ref.actor.optim.in_backward
    own: SequenceRole = "critic" if role in ("values", "critic") else "ref" if role == "ref" else "actor"
    keeps = model.recompute_elementwise and settings.actor_rollout_ref.model.block_tile_tokens is None and not in_backward
    keeps = keeps and sequence_ranks(settings, own) == 1
    # If no turn forks, a conversation has at most ``longest`` tokens, and the settings give a micro-batch room for so many.
    return longest if by_tokens and is_longer and keeps else 0


def _parts(settings: Settings, tokens: int) -> int:
    # A path fits in one pass, so a second part begins only where a node has several children with more tokens than a pass.
    rows = settings.data.train_batch_size * settings.actor_rollout_ref.rollout.n
    return max(rows * longest_sample(settings) * (most_turns(settings) or 1) // tokens, 1).bit_length()


def assumptions(settings: Settings) -> str:
    """Say what a prediction assumes about conversations."""
    turns, actor = most_turns(settings), settings.actor_rollout_ref.actor
    count = "any number of turns" if turns is None else f"at most {turns} turns"
    longest, path = longest_sample(settings), open_tokens(settings, "actor")
    text = f"Conversations of {count} and {longest:,} tokens, those of tools included."
    if not actor.use_dynamic_bsz:
        told = "of which each goes on where it ended" if turns is None else "of which each turn may fork"
        return f"{text} Micro-batches count conversations, {told}. To bound their tokens, set {_BY_TOKENS}=true."
    text += f" How long turns are is not known, so micro-batches are full ({actor.ppo_max_token_len_per_gpu:,} computed tokens)."
    if path:
        text += f" A conversation that forks may be longer than that: then keys and values of up to {path:,} tokens are kept."
    return text


def _pass(
    pack: Pack,
    everything: int,
    path: Sequence[Pack] = (),
    own: Pack | None = None,
    summed: int = 0,
    opens: bool = False,
    closes: bool = False,
    alone: bool = False,
) -> Pass:
    """Return the pass of a pack.

    ``path`` has the packs of the open nodes before it, outermost first, and ``own`` is the pack itself if its tokens are of open
    nodes. Of these, the first ``summed`` have sums of gradients when the pass begins.
    """
    layout, last = pack.layout, pack.last_block
    tokens, kept = pack.input_ids.shape[1], [*path, *([] if own is None else [own])]
    sizes = [part.input_ids.shape[1] for part in path]
    spans = [_sizes([span]) for span in layout.spans]
    rounds = [_sizes(some.spans) for some in layout.rounds]
    work = ForestWork(
        skipped=0 if last is None or kept else tokens - len(last.layout.query_places),
        run=max(run.count * run.length for run in layout.runs),
        span=max(spans, key=_rows, default=(0, 0)),
        round=max(rounds, key=_rows, default=(0, 0)),
        sums_many=layout.sums_many,
        read=sum(sizes),
        copied=sum(accumulate(reversed(sizes), initial=tokens)) - tokens,
        held=sum(part.input_ids.shape[1] for part in kept),
        summed=sum(part.input_ids.shape[1] for part in kept[:summed]),
        states=sum(len(part.predicts_on_host) for part in kept),
        opens=opens,
        closes=closes,
    )
    return Pass(tokens, len(pack.targets), len(layout.segments), everything, alone=alone, forest=work)


def _sizes(spans: Sequence[PrefixSpan]) -> tuple[int, int]:
    return sum(span.queries.length for span in spans), sum(span.keys.length for span in spans)


def _rows(pair: tuple[int, int]) -> int:
    # A backward makes gradients of queries, keys and values.
    return pair[0] + 2 * pair[1]
