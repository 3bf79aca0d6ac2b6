import torch

from verl_memopt.config import schema
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights, store_scalars
from verl_memopt.rollout.engine import EnginePlace, SamplingSettings, build_engine

EOS = 2
SHAPE = {"initializer_range": 0.2, "max_positions": 256}


def tiny_folder(folder, *, tied, seed=0):
    return make_tiny_model(folder, TinyShape(tie_embeddings=tied, **SHAPE), seed=seed)


def rollout_settings(name, **changes):
    fixed = {
        "prompt_length": 160,
        "response_length": 64,
        "dtype": "float32",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_gb": 0.02,
        "enforce_eager": True,
        "seed": 5,
    }
    return schema.Rollout(name=name, **(fixed | changes))


def place_at(folder, *, rank=0, world_size=1, tensor_parallel_size=1):
    return EnginePlace(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        tensor_parallel_size=tensor_parallel_size,
        device=torch.device("cpu"),
        model_folder=str(folder),
        tokenizer_folder=str(folder),
        trust_remote_code=False,
        eos_token_ids=(EOS,),
    )


def engine_at(name, folder, **changes):
    return build_engine(rollout_settings(name, **changes), place_at(folder))


def sampling(**changes):
    fixed = {
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "do_sample": True,
        "max_tokens": 12,
        "ignore_eos": True,
        "log_probs": True,
    }
    return SamplingSettings(**(fixed | changes))


def prompts(rows):
    return [[3 + (row * 31 + place * 7) % 290 for place in range(1 + row % 9)] for row in range(rows)]


def model_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weights_of(model):
    store_scalars(model)
    return ((name, weight.detach()) for name, weight in named_weights(model))


@torch.no_grad()
def naive_log_probs(model, prompt, response, temperature):
    """Return the log-probs of a response from one forward of the whole row."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()


def difference_from_naive(model, rows, answer, temperature=1.0):
    """Return the largest difference between an answer's log-probs and those of one forward of each row."""
    naive = [naive_log_probs(model, row, ids, temperature) for row, ids in zip(rows, answer.response_ids, strict=True)]
    return largest_difference(answer.log_probs, naive)


def largest_difference(left, right):
    return max(abs(a - b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))
