"""A trained policy leaves as a Hugging Face folder: transformers and vLLM answer as the run did, and a new run starts from it."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.runs import LOCAL, lines_of, metrics, train_here
from tests.rlt import brief_toy, values_of
from tests.rollout.tools import place_at
from verl_memopt.config import schema
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.rollout.engine import SamplingSettings, build_engine
from verl_memopt.trainer.main_ppo import train

AR = "actor_rollout_ref"
STEPS = 2
KEPT = {"trainer.save_freq": STEPS, "trainer.test_freq": STEPS, f"{AR}.actor.checkpoint.save_contents": "[model,extra,hf_model]"}
GREEDY = SamplingSettings(
    temperature=1.0, top_k=-1, top_p=1.0, repetition_penalty=1.0, do_sample=False, max_tokens=4, ignore_eos=False, log_probs=True
)  # fmt: skip


class Saved:
    """A run of two steps that saved its policy and wrote its validation answers, which are greedy."""

    def __init__(self, root, start):
        self.run_dir, self.start = root / "run", start
        dumps = {"trainer.validation_data_dir": str(root / "val"), "trainer.rollout_data_dir": str(root / "rows")}
        start(self.run_dir, **KEPT | dumps)
        self.dump, self.checkpoint = root / "rows", self.run_dir / f"global_step_{STEPS}"
        self.folder = self.checkpoint / "actor" / "huggingface"
        self.answers = lines_of(root / "val" / f"{STEPS}.jsonl")

    def prompts_and_answers(self):
        return [row["prompt_ids"] for row in self.answers], [row["response_ids"] for row in self.answers]


@pytest.fixture(scope="module")
def saved_by_rloo(toy, tmp_path_factory):
    def start(run_dir, **more):
        words = [f"{key}={value}" for key, value in more.items()]
        length = [] if "trainer.total_training_steps" in more else [f"trainer.total_training_steps={STEPS}"]
        few = ["data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8"]
        assert train_here(toy, run_dir, *LOCAL, "trainer.val_before_train=false", *few, *length, *words) == 0

    return Saved(tmp_path_factory.mktemp("rloo"), start)


@pytest.fixture(scope="module")
def saved_by_rlt(tmp_path_factory):
    """The teacher of RLT, which is the policy of its run."""
    root = tmp_path_factory.mktemp("rlt")
    toy = brief_toy(root / "toy")

    def start(run_dir, **more):
        contents = {f"{AR}.actor.checkpoint.save_contents": ["model", "extra", "hf_model"]}
        changed = {key: value for key, value in more.items() if not key.endswith("save_contents")}
        assert train(settings_from_mapping(values_of(toy, run_dir, changed | contents))) == 0

    return Saved(root, start)


@pytest.fixture(params=["rloo", pytest.param("rlt", marks=pytest.mark.slow)])
def saved(request):
    return request.getfixturevalue(f"saved_by_{request.param}")


@torch.no_grad()
def test_transformers_answers_as_the_engine_of_the_run_did(saved):
    model = AutoModelForCausalLM.from_pretrained(saved.folder, dtype=torch.float32).eval()
    stop = AutoTokenizer.from_pretrained(saved.folder).eos_token_id
    prompts, answers = saved.prompts_and_answers()
    assert len({tuple(answer) for answer in answers}) > 1
    for prompt, answer in zip(prompts[:16], answers[:16], strict=True):
        longest = len(answer) if answer[-1] == stop else max(map(len, answers))
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=longest, do_sample=False, eos_token_id=stop, pad_token_id=0
        )
        assert output[0, len(prompt) :].tolist() == answer


@torch.no_grad()
def test_logits_of_transformers_are_those_of_the_policy_in_the_checkpoint(saved):
    """The policy computes its log-probs of a dump from the checkpoint itself, transformers from the exported folder."""
    again, dump = saved.run_dir.parent / "scored", saved.run_dir.parent / "next"
    dump.mkdir()  # the step after the checkpoint has the responses of the last step
    (dump / f"{STEPS + 1}.jsonl").write_text((saved.dump / f"{STEPS}.jsonl").read_text())
    saved.start(again, **{
        "debug.mode": "score_only", "trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(saved.checkpoint),
        f"{AR}.rollout.skip_dump_dir": str(dump), "trainer.total_training_steps": STEPS + 1,
    })  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(saved.folder, dtype=torch.float32).eval()
    temperature = 0.7 if saved.dump.parent.name.startswith("rlt") else 1.0
    log_probs = []
    for row in lines_of(saved.dump / f"{STEPS}.jsonl"):
        ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].float() / temperature
        log_probs.append(logits.log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None])[:, 0])
    expected = torch.cat(log_probs).double()
    row = metrics(again / "score_only")[STEPS + 1]
    for name, value in (("mean", expected.mean()), ("min", expected.min()), ("max", expected.max())):
        assert row[f"score/log_prob/{name}"] == pytest.approx(value.item(), abs=1e-5)


def check_vllm_answers(folder, prompts, answers):
    """vLLM loads a model folder and gives these answers to prompts, all as token ids."""
    longest, most = max(map(len, prompts)), max(map(len, answers))
    settings = schema.Rollout(
        name="vllm", prompt_length=longest, response_length=most, dtype="fp32", enforce_eager=True, kv_cache_memory_gb=0.05,
        load_format="auto", seed=1,
    )  # fmt: skip
    engine = build_engine(settings, place_at(folder))
    try:
        assert engine.generate(prompts, [0] * len(prompts), replace(GREEDY, max_tokens=most)).response_ids == answers
    finally:
        engine.shutdown()


def test_vllm_answers_as_the_engine_of_the_run_did(saved):
    check_vllm_answers(saved.folder, *saved.prompts_and_answers())


def test_a_new_run_starts_where_the_saved_policy_ended(saved, tmp_path):
    saved.start(
        tmp_path / "new",
        **{f"{AR}.model.path": str(saved.folder), "trainer.val_only": True, "trainer.validation_data_dir": str(tmp_path / "val")},
    )
    first = lines_of(tmp_path / "val" / "0.jsonl")
    assert [row["response_ids"] for row in first] == [row["response_ids"] for row in saved.answers]
    assert [row["score"] for row in first] == pytest.approx([row["score"] for row in saved.answers], abs=1e-5)
