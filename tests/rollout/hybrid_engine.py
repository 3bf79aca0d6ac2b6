"""Runs vLLM's engine on two models with layers of linear attention, in a process of its own, and prints what it found as JSON.

``python -m tests.rollout.hybrid_engine FOLDER OTHER``: two folders of the same shape, with other weights.
"""

import json
import sys

import torch

from tests.rollout.tools import difference_from_naive, engine_at, model_of, prompts, sampling, weights_of
from verl_memopt.errors import RolloutError

SEEDS = list(range(6))


def rounded(folder):
    """Return a model of fp32 numbers that bfloat16 holds exactly."""
    model = model_of(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def bfloat16(model):
    return ((name, weight.bfloat16()) for name, weight in weights_of(model))


def main(folder, other):
    first, second, rows = rounded(folder), rounded(other), [*prompts(5), [3 + place % 290 for place in range(130)]]
    engine = engine_at("vllm", folder, dtype="bfloat16")

    def answers(model):
        answer = engine.generate(rows, SEEDS, sampling(max_tokens=20))
        return answer.response_ids, answer.log_probs, difference_from_naive(model, rows, answer)

    found = []
    for model in (first, second, second, first):
        engine.load_weights(bfloat16(model))
        found.append(answers(model))
    compared = engine.compare_weights(bfloat16(first))
    try:
        shared = engine.share_weights()
    except RolloutError:
        shared = {}  # not of a model with experts, whose order vLLM changes
    for model in (second, first) if shared else ():
        for name, weight in bfloat16(model):
            shared[name].copy_(weight)
        engine.weights_changed(shared)
        found.append(answers(model))
    own = {parameter.untyped_storage().data_ptr() for parameter in engine._model.parameters()}
    apart = [name for name, weight in shared.items() if weight.untyped_storage().data_ptr() not in own]
    engine.shutdown()
    first, second = found[:2]
    return {
        "differences": [difference for *_, difference in (first, second)],
        "again": [answer[:2] == (first, second)[number in (1, 2, 4)][:2] for number, answer in enumerate(found)],
        "compared": [len(compared.equal), compared.different, compared.unknown],
        "shared": len(shared),
        "apart": sorted({name.rsplit(".layers.")[-1].split(".", 1)[1] for name in apart}),
        "weights": len(dict(rounded(folder).named_parameters())),
    }


if __name__ == "__main__":
    with torch.no_grad():
        sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
