"""Runs vLLM on the folder of a multimodal model, as a text model, in a process of its own. Prints a difference of log-probs.

``python -m tests.rollout.whole_engine FOLDER DTYPE``: prints by how much its log-probs differ from those of transformers.
"""

import sys

import torch

from tests.model.architectures import whole_model
from tests.rollout.tools import difference_from_naive, place_at, prompts, rollout_settings, sampling
from verl_memopt.config import schema
from verl_memopt.rollout.engine import build_engine


def main(folder, dtype):
    further = schema.EngineKwargs(vllm={"language_model_only": True})
    engine = build_engine(rollout_settings("vllm", dtype=dtype, load_format="auto", engine_kwargs=further), place_at(folder))
    model = whole_model(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    answer = engine.generate(prompts(6), list(range(6)), sampling())
    engine.shutdown()
    return difference_from_naive(model, prompts(6), answer)


if __name__ == "__main__":
    sys.stdout.write(f"{main(*sys.argv[1:])}\n")
