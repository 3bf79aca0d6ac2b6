"""RLT's reward written down once more, for one sample, without batches: the reference of the tests.

Nothing here is shared with the package but the records of settings and of the format.
"""

import math
from dataclasses import dataclass

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


def token_text(tokenizer, token):
    """Return the bytes of one token."""
    added = tokenizer.added_tokens_decoder
    if token in added:
        return added[token].content.encode()
    return bytes(BYTE_OF[character] for character in tokenizer.convert_ids_to_tokens(token))


def explanation_of(tokenizer, response, end_tag, stop_ids):
    """Return the tokens before the end tag, token by token, and whether there is one."""
    kept = []
    for token in response:
        if token in stop_ids:
            break
        kept.append(token)
    texts = [token_text(tokenizer, token) for token in kept]
    place = b"".join(texts).find(end_tag.encode())
    if place < 0:
        return kept, False
    think = []
    for token, length in zip(kept, (len(b"".join(texts[: n + 1])) for n in range(len(texts))), strict=True):
        if length > place:
            break
        think.append(token)
    return think, True


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]


@dataclass
class Sample:
    """The five parts of the student's row, and the teacher's prompt."""

    prefix: list
    think: list
    bridge: list
    solution: list
    end: list
    matched: bool
    teacher_prompt: list

    @property
    def lengths(self):
        return [len(part) for part in (self.prefix, self.think, self.bridge, self.solution, self.end)]

    @property
    def student_ids(self):
        return self.prefix + self.think + self.bridge + self.solution + self.end


def chat(tokenizer, system, question):
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": question})
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def sample_of(tokenizer, rlt_format, question, solution, response, stop_ids):
    f = rlt_format
    think, matched = explanation_of(tokenizer, response, f.explanation.end, stop_ids)
    student = chat(tokenizer, f.student_system, question) + f.thought.begin + "\n\n"
    teacher = chat(tokenizer, f.teacher_system, question)
    teacher += f.solution.begin + solution + f.solution.end + "\n\n" + f.explanation.begin + "\n\n"
    return Sample(
        prefix=ids_of(tokenizer, student),
        think=think,
        bridge=ids_of(tokenizer, f.thought.end + "\n\n" + f.solution.begin),
        solution=ids_of(tokenizer, solution),
        end=ids_of(tokenizer, f.solution.end + "<|im_end|>\n"),
        matched=matched,
        teacher_prompt=ids_of(tokenizer, teacher),
    )


@torch.no_grad()
def log_probs(lm, ids, temperature):
    """Return the log-prob of each token but the first, from whole logits: entry t belongs to token t + 1."""
    logits = lm(torch.tensor([ids])).logits[0].float() / temperature
    return logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def spans(student_lm, teacher_lm, sample, student_temperature, teacher_temperature):
    """Return s, u and v of one sample, sliced by the five lengths."""
    x = log_probs(student_lm, sample.student_ids, student_temperature)
    prefix, think, bridge, solution, _ = sample.lengths
    u = x[prefix - 1 : prefix - 1 + think]
    s = x[prefix + think + bridge - 1 : prefix + think + bridge + solution - 1]
    y = log_probs(teacher_lm, sample.teacher_prompt + sample.think, teacher_temperature)
    return s, u, y[len(sample.teacher_prompt) - 1 :]


def reduced(name, values):
    ordered = sorted(values)
    if name == "median":
        return ordered[(len(ordered) - 1) // 2]
    if name in ("first_quartile", "last_quartile"):
        place = {"first_quartile": 0.25, "last_quartile": 0.75}[name] * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])
    return {"mean": sum(values) / len(values), "sum": sum(values), "min": ordered[0], "max": ordered[-1]}[name]


def exp(value):
    return math.exp(value) if value < 700 else math.inf


def transformed(name, value):
    return {"none": lambda x: x, "exp": exp, "exp_norm": lambda x: 1 - exp(-x)}[name](value)


def reward(settings, s, u, v, matched):
    """Return the reward, r_ss and r_kl of one sample."""
    solution = [max(transformed(settings.normalize_log_prob_fn, each), -settings.clip_log_prob) for each in s]
    r_ss = sum(
        weight * reduced(name, solution)
        for weight, name in zip(settings.answer_log_prob_coeff, settings.reduction_log_prob_fn, strict=True)
    )
    think = []
    for student, teacher in zip(u, v, strict=True):
        d = teacher - student
        if not settings.include_teacher_think_entropy:
            d = -student
        elif settings.use_schulman_kl_estimation:
            d = d - 1 + exp(-d)
        think.append(min(transformed(settings.normalize_kl_fn, d), settings.clip_kl))
    r_kl = sum(
        weight * (reduced(name, think) if think else settings.empty_think_kl)
        for weight, name in zip(settings.kl_penalty_reward_coeff, settings.reduction_kl_fn, strict=True)
    )
    return r_ss - r_kl + (0 if matched else settings.not_matched_penalty), r_ss, r_kl
