"""``python -m benchmarks.rlt_student.published RLT``: rewards beside those of the published code, on the same texts and models.

    git clone https://github.com/SakanaAI/RLT
    python -m benchmarks.rlt_student.published RLT [--text FILE]

60 explanations are scored by ``TeacherKLBasedReward`` of that folder and by this project's rows and formula. Models and tokenizer
are made here: two tiny Qwen3 with random weights, and a byte-level BPE with Qwen2's rule for words, trained on system prompts.
One of its tokens holds the end of a tag and the line breaks after it. Log-probs come from transformers' own forward, fp64.
Exit codes: 0 the table is written, 2 the folder is not the published code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import random
import sys
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl_memopt.data.batch import Ragged
from verl_memopt.model.tiny import CHAT_TEMPLATE, SPECIALS, TURN_END
from verl_memopt.recipes.rlt.dataset import STRATOS, RltPrompts
from verl_memopt.recipes.rlt.formula import rlt_scores
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student_rows import NAMES, THINK, StudentEncoder

TEXT = f"{STRATOS.teacher_system} {STRATOS.student_system}"
HEAT, COUNT, BOUND = 0.7, 60, 1e-5
WORDS_OF_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
Samples = list[tuple[str, str, str]]
PLACES = (("start", "begin"), ("end", "end"))
WAYS = [(align, forced) for align in ("concat", "retokenize") for forced in (False, True)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS_OF_QWEN2), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    turns = [f"{STRATOS.forced_prefix}We\n\n{STRATOS.student_opening}So{STRATOS.bridge}7{STRATOS.solution.end}"] * 200
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT, *turns], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=SPECIALS[0], additional_special_tokens=[SPECIALS[1]],
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def make_model(seed: int, vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double().eval()


def samples() -> Samples:
    """Gives questions, solutions and what the teacher wrote after its forced prefix; every tenth has no end tag."""
    chance = random.Random(0)
    words = TEXT.split()
    found = []
    for number in range(COUNT):
        one, two = chance.randrange(100), chance.randrange(100)
        start = chance.randrange(len(words) - 40)
        thought = " ".join(words[start : start + chance.randrange(5, 30)]).replace("<", "(")
        thought = f"We add {one} and {two}.\n\n{thought}" + chance.choice(["", "\n", "\n\n", "."])
        end = "" if number % 10 == 9 else STRATOS.explanation.end
        found.append((f"What is {one} + {two}?", f"The sum is {one + two}.", thought + end))
    return found


def log_probs(model: Any, ids: Sequence[int]) -> Tensor:
    """Gives the log-prob of each token but the first, fp64 [T - 1]."""
    ids = torch.tensor(ids)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1] / HEAT
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def load_published(folder: Path) -> types.ModuleType:
    """Gives the module of the published reward, without the trainer around it."""
    package = types.ModuleType("published_rlt")
    package.__path__ = []
    sys.modules[package.__name__] = package
    for name in ("teacher_base", "teacher_rewards"):
        spec = importlib.util.spec_from_file_location(f"published_rlt.{name}", folder / "trainers" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


class StandIn:
    """What the published reward asks of its trainer: a temperature, and somewhere to log."""

    gen_temperature = HEAT
    accelerator = types.SimpleNamespace(is_main_process=False)

    def log_metric(self, **values: Any) -> dict[str, Any]:
        return values

    def _print_debugging_logs(self, to_print: str) -> None:
        pass


def published_rewards(
    module: types.ModuleType, tokenizer: Any, student: Any, teacher: Any, texts: Sequence[tuple]
) -> list[float]:
    """Gives the reward of each sample by the published code, NaN where it raises."""
    reward = module.TeacherKLBasedReward(
        answer_log_prob_coeff=[1, 0.01], kl_penalty_reward_coeff=[3, 0.03], normalize_log_prob_fn=None, clip_log_prob=100000,
        normalize_kl_fn=None, clip_kl=100000, reduction_log_prob_fn=["mean", "min"], reduction_kl_fn=["mean", "max"],
        unbias_teacher_log_probs=True, unbias_student_log_probs_temp=HEAT,
    )  # fmt: skip
    reward.link_with_trainer(StandIn(), student, teacher, tokenizer)
    prompts, found = RltPrompts(tokenizer, STRATOS), []
    for question, solution, response in texts:
        given = {
            **{f"{place}_think_teacher_tags": getattr(STRATOS.explanation, name) for place, name in PLACES},
            **{f"{place}_think_student_tags": getattr(STRATOS.thought, name) for place, name in PLACES},
            **{f"{place}_solution_tags": getattr(STRATOS.solution, name) for place, name in PLACES},
            "prompts": prompts.teacher(question, solution)[0], "completions": response, "questions": question,
            "solutions": STRATOS.solution.wrap(solution), "student_system_prompts": STRATOS.student_system,
            "think_prefixes": STRATOS.think_prefix, "think_solution_delimiters": STRATOS.delimiter,
            "masked_out_think_prefix": STRATOS.forced_prefix,
        }  # fmt: skip
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                (value,) = reward(**{name: [text] for name, text in given.items()})
        except Exception as error:  # noqa: BLE001 - counted
            sys.stderr.write(f"the published code raised {type(error).__name__}: {error}\n")
            value = float("nan")
        found.append(value)
    return found


def own_rewards(tokenizer: Any, student: Any, teacher: Any, texts: Samples, align: str, forced: bool) -> tuple[Any, Any]:
    """Gives this project's rows of the samples and their scores."""
    settings = RltReward(align=align, include_forced_prefix=forced)
    encoder = StudentEncoder(RltPrompts(tokenizer, STRATOS), settings, {tokenizer.eos_token_id, tokenizer.pad_token_id})
    questions, solutions, responses = zip(*texts, strict=True)
    ids = Ragged.from_rows([tokenizer(text, add_special_tokens=False)["input_ids"] for text in responses], torch.int64)
    names = [f"row {number}" for number in range(len(texts))]
    rows = encoder.encode(questions, solutions, ids, names)
    openings, thoughts = encoder.teacher_prompts(questions, solutions).rows(), rows.part(THINK).rows()
    u, v, s = [], [], []
    for number, row in enumerate(rows.ids.rows()):
        prefix, think, bridge, solution, _ = rows.parts[number].tolist()
        of_student = log_probs(student, row.tolist())
        u.append(of_student[prefix - 1 : prefix - 1 + think])
        s.append(of_student[prefix + think + bridge - 1 :][:solution])
        opening, thought = openings[number].tolist(), thoughts[number].tolist()
        v.append(log_probs(teacher, opening + thought)[len(opening) - 1 :])
    return rows, rlt_scores(settings, rows, torch.cat(u), torch.cat(v), torch.cat(s), names)


def table(module: types.ModuleType) -> str:
    tokenizer, texts = make_tokenizer(), samples()
    student, teacher = make_model(1, len(tokenizer)), make_model(2, len(tokenizer))
    theirs = torch.tensor(published_rewards(module, tokenizer, student, teacher, texts), dtype=torch.float64)
    joined = tokenizer.tokenize(f"{STRATOS.explanation.begin}\n\nWe")
    lines = [
        f"{COUNT} explanations, {len(tokenizer)} tokens; the begin tag and the blank line are the tokens {joined[-3:]}",
        f"the published code gives {int(theirs.isfinite().sum())} rewards, spread {theirs[theirs.isfinite()].std():.3f}",
        f"{'align':12}{'include_forced_prefix':23}{'equal':>7}{'mean |difference|':>19}{'largest':>10}  rows",
    ]
    for align, forced in WAYS:
        rows, scores = own_rewards(tokenizer, student, teacher, texts, align, forced)
        gaps = (scores.reward.double() - theirs).abs()[theirs.isfinite()]
        counts = Counter(NAMES[status] for status in rows.status.tolist())
        status = ", ".join(f"{count} {name}" for name, count in counts.items())
        lines.append(f"{align:12}{forced!s:23}{int((gaps < BOUND).sum()):7}{gaps.mean():19.2e}{gaps.max():10.2e}  {status}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.rlt_student.published", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the published code")
    parser.add_argument("--text", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    if not (options.folder / "trainers" / "teacher_rewards.py").is_file():
        print(f"{options.folder}: it has no trainers/teacher_rewards.py. Give a clone of SakanaAI/RLT.", file=sys.stderr)
        return 2
    text = table(load_published(options.folder))
    print(text)
    if options.text:
        options.text.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
