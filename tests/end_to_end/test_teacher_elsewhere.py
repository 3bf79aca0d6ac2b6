"""Runs on the toy task whose teacher is a server or a column of the rows, or has a tokenizer of its own."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.runs import LOCAL, lines_of, steps_here
from tests.end_to_end.test_distill import SHORT, log_probs_of
from verl_memopt.cli import main
from verl_memopt.model.tiny import TinyShape, build_tokenizer, make_tiny_model

AR = "actor_rollout_ref"
NAMES = ("actor/grad_norm", "actor/loss", "actor/distill_loss")
SUPERVISED = [
    "algorithm.adv_estimator=sft", f"{AR}.actor.policy_loss.loss_mode=gpg", f"{AR}.rollout.n=1", "distill.coef=1",
    "distill.divergence=forward_kl", "data.response_key=answer", "trainer.val_before_train=false", "data.val_files=null",
]  # fmt: skip


def refused(toy, tmp_path, capsys, *overrides):
    given = [
        f"data.train_files={toy}/train.parquet", "data.val_files=null", f"{AR}.model.path={toy}/model", *LOCAL,
        f"trainer.default_local_dir={tmp_path}/run", f"{AR}.actor.use_dynamic_bsz=true",
    ]  # fmt: skip
    assert main(["train", "--config-name", "distill_trainer", *given, *overrides]) == 2
    return capsys.readouterr().err


class Server:
    """A server of completions with a real model. ``changes`` changes an answer before it is sent."""

    def __init__(self, folder):
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.changes, self.keys, self.lock = lambda choice: None, [], threading.Lock()

    def answer(self, body):
        ids = body["prompt"]
        with torch.no_grad(), self.lock:
            log_probs = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        if "prompt_logprobs" in body:
            return {"prompt_logprobs": [None, *(self.place(*pair, body) for pair in zip(ids[1:], log_probs, strict=True))]}
        sampled = [row[token].item() for token, row in zip(ids[1:], log_probs, strict=True)]
        said = {"tokens": [self.tokenizer.decode([token]) for token in ids], "token_logprobs": [None, *sampled, -1.0]}
        return {"logprobs": said}

    def place(self, token, row, body):
        ids = {token, *row.topk(body["prompt_logprobs"]).indices.tolist()} if body["prompt_logprobs"] else {token}
        return {str(each): {"logprob": row[each].item(), "decoded_token": self.tokenizer.decode([each])} for each in ids}


@contextmanager
def serving(server):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            server.keys.append(self.headers.get("Authorization"))
            choice = server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            server.changes(choice)
            text = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"teacher.endpoint.url=http://127.0.0.1:{listening.server_port}/v1/completions"
        listening.shutdown()


@pytest.fixture(scope="module")
def server(teacher):
    return Server(teacher)


@pytest.fixture
def asked(server):
    server.changes, server.keys = lambda choice: None, []
    with serving(server) as url:
        yield url


def the_same(rows, others):
    # Adam's first step follows signs, so rounding grows in it.
    for step, rel in ((1, 1e-4), (2, 2e-3)):
        for name in (name for name in NAMES if name in rows[step]):
            assert others[step][name] == pytest.approx(rows[step][name], rel=rel), (step, name)


def test_a_server_says_what_the_model_would_say(toy, tmp_path, teacher, server, asked, monkeypatch, capsys):
    keyed = [asked, "teacher.endpoint.api_key_env=TEACHER_KEY"]
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    assert "api_key_env=TEACHER_KEY: there is no such" in refused(toy, tmp_path, capsys, *keyed, "distill.divergence=sampled")
    monkeypatch.setenv("TEACHER_KEY", "secret")
    form, named = "distill.divergence=sampled", f"teacher.model.path={teacher}"
    here = steps_here(toy, tmp_path / "here", *SHORT, named, form)
    there = steps_here(toy, tmp_path / "there", *SHORT[:-1], *keyed, form)
    the_same(here, there)
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in "".join(path.read_text() for path in (tmp_path / "there").glob("*.json*"))
    other = steps_here(toy, tmp_path / "openai", *SHORT[:-1], asked, form, "teacher.endpoint.api=openai")
    the_same(here, other)


def test_a_server_reads_the_turns_of_conversations(toy, tmp_path, teacher, asked):
    world, rollout = Path(__file__).parents[1] / "agents" / "world.py", f"{AR}.rollout"
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{a}+{a}=", "number": {a}}}\n' for a in range(8)))
    more = [
        f"{rollout}.agent.environment.path={world}", f"{rollout}.agent.environment.name=World",
        f"{rollout}.multi_turn.format={world}:calls", f"{rollout}.multi_turn.max_assistant_turns=3", "data.val_files=null",
        f"data.train_files={tmp_path}/rows.jsonl", "data.max_response_length=60", "data.max_prompt_length=64",
        f"{rollout}.stop_token_ids={list(range(20, 120))}", f"{rollout}.multi_turn.max_tool_response_length=10",
        f"{AR}.actor.ppo_max_token_len_per_gpu=256", f"{AR}.rollout.log_prob_max_token_len_per_gpu=256",
    ]  # fmt: skip
    for form in (["distill.divergence=sampled"], ["distill.divergence=reverse_kl", "distill.top_k=8"]):
        place, named = tmp_path / str(len(form)), f"teacher.model.path={teacher}"
        here = steps_here(toy, place / "here", *SHORT, *more, *form, named, "teacher.log_prob_max_token_len_per_gpu=256")
        the_same(here, steps_here(toy, place / "there", *SHORT[:-1], *more, *form, asked))
        assert here[1]["agent/turns/mean"] > 1


def test_a_server_says_the_most_probable_tokens(toy, tmp_path, teacher, asked):
    for form in ("reverse_kl", "forward_kl"):
        top = f"distill.divergence={form}", "distill.top_k=8"
        here = steps_here(toy, tmp_path / f"here_{form}", *SHORT, f"teacher.model.path={teacher}", *top)
        the_same(here, steps_here(toy, tmp_path / f"there_{form}", *SHORT[:-1], asked, *top))


def test_answers_that_are_no_log_probs_of_these_tokens_end_the_run_with_one_line(toy, tmp_path, capsys, server, asked):
    def said(changes, *more, code=2):
        server.changes = changes
        arguments = [f"data.train_files={toy}/train.parquet", "data.val_files=null", f"{AR}.model.path={toy}/model"]
        arguments += [f"trainer.default_local_dir={tmp_path}/run", f"{AR}.actor.use_dynamic_bsz=true", *SHORT[:-1], asked]
        arguments += ["distill.divergence=sampled", *more]
        assert main(["train", "--config-name", "distill_trainer", *arguments]) == code
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "Error: " in line]
        return line

    few = said(lambda choice: choice["prompt_logprobs"].pop())
    assert few.startswith("ConfigError: teacher.endpoint.url=http://127.0.0.1")
    assert "log-probs for" in few
    assert "--max-model-len" in few
    none = said(lambda choice: choice.clear())
    assert "has no log-probs of the prompt's tokens in the form of teacher.endpoint.api=vllm" in none

    def rename(choice):
        for place in choice["prompt_logprobs"][1:]:
            for entry in place.values():
                entry["decoded_token"] = "?"

    assert "Teacher and policy are compared token by token" in said(rename)
    trial = iter(range(100))
    late = said(lambda choice: next(trial) and choice["prompt_logprobs"].pop(), code=1)
    assert late.startswith("TeacherError: teacher.endpoint.url=")
    assert "(sample of step 1)" in late

    def shorten(choice):
        while len(last := choice["prompt_logprobs"][-1]) > 7:
            last.popitem()

    top = said(shorten, "distill.divergence=forward_kl", "distill.top_k=8")
    assert "the log-probs of 7 tokens at a place, and distill.top_k=8 needs as many" in top


def test_a_column_says_the_most_probable_tokens(toy, tmp_path, teacher, capsys):
    tokenizer = AutoTokenizer.from_pretrained(toy / "model")
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1, 9)]
    for row in rows:
        ids, response = tokenizer(row["prompt"]).input_ids, [*tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id]
        top = log_probs_of(teacher, ids, response).topk(8)
        row["said"] = [list(zip(*pair, strict=True)) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = [*SHORT[:-1], *SUPERVISED, "distill.top_k=8", f"data.train_files={tmp_path}/rows.jsonl"]
    here = steps_here(toy, tmp_path / "here", *common, f"teacher.model.path={teacher}", "teacher.fsdp_config.dtype=fp32")
    the_same(here, steps_here(toy, tmp_path / "column", *common, "teacher.log_probs_key=said"))
    rows[2]["said"].pop()
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = [
        *common,
        "teacher.log_probs_key=said",
        f"{AR}.model.path={toy}/model",
        f"trainer.default_local_dir={tmp_path}/few",
    ]
    assert main(["train", "--config-name", "sft_trainer", *arguments]) == 2
    assert "3: teacher.log_probs_key=said: the response has 2 tokens with the turn's end" in capsys.readouterr().err


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A model with another tokenizer and another chat template."""
    tokenizer = build_tokenizer(330, "1+1=2 " * 9 + "the sums of the sums ", "{{ messages[-1].content }} is ")
    folder = make_tiny_model(
        tmp_path_factory.mktemp("stranger") / "model", TinyShape(vocab_size=340, initializer_range=0.06), seed=5
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_a_teacher_with_another_tokenizer_judges_the_text(toy, tmp_path, stranger):
    form = ["distill.divergence=sampled", "distill.align=text"]
    named, dumped = f"teacher.model.path={stranger}", f"trainer.rollout_data_dir={tmp_path}/rollouts"
    here = steps_here(toy, tmp_path / "here", *SHORT, *form, named, dumped)
    own, other = (AutoTokenizer.from_pretrained(folder) for folder in (toy / "model", stranger))
    estimate, tokens = 0.0, 0
    for sample in lines_of(tmp_path / "rollouts" / "1.jsonl"):
        ids = sample["response_ids"]
        a = log_probs_of(toy / "model", sample["prompt_ids"], ids).gather(-1, torch.tensor(ids)[:, None]).sum().item()
        ended = ids[-1] == own.eos_token_id
        asked = own.decode(sample["prompt_ids"]).split("<|im_start|>user")[-1].split("<|im_end|>")[0].strip()
        retold = other(own.decode(ids[: len(ids) - ended])).input_ids + [other.eos_token_id] * ended
        b = log_probs_of(stranger, other(f"{asked} is ").input_ids, retold)
        estimate += a - b.gather(-1, torch.tensor(retold)[:, None]).sum().item()
        tokens += len(ids)
    assert here[1]["distill/kl_mean"] == pytest.approx(estimate / tokens, rel=1e-4)
    server = Server(stranger)
    with serving(server) as url:
        asked = steps_here(toy, tmp_path / "asked", *SHORT[:-1], *form, url, f"teacher.model.tokenizer_path={stranger}")
    the_same(here, asked)


def test_a_teacher_with_another_tokenizer_is_refused_with_the_way_out(toy, tmp_path, capsys, stranger):
    said = refused(toy, tmp_path, capsys, f"teacher.model.path={stranger}", "distill.divergence=sampled")
    assert "its tokenizer is another than the policy's" in said
    assert "distill.align=text" in said
    said = refused(toy, tmp_path, capsys, f"teacher.model.path={stranger}", "distill.align=text")
    assert "tokens of two vocabularies have no divergence" in said
