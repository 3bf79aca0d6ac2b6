"""The primitives of a step from Python (``verl_memopt.session``), and the notebook."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl_memopt
from tests.end_to_end.runs import wait_for_step
from tests.forked import shared_server
from tests.rewards.processes import all_gone
from tests.test_api import ROWS, SMALL, right, sums
from verl_memopt.errors import CheckpointError, ConfigError, RewardError, TrainingError


@pytest.fixture(scope="module")
def model(toy):
    return str(toy / "model")


def test_a_session_goes_back_in_a_stream_as_in_rows_read_whole(model, tmp_path):
    with verl_memopt.session(model, sums, steps=9, run_dir=tmp_path / "run", train_batch_size=4, **SMALL) as session:
        session.generate()
        path = session.save_state()
        prompts = [row["prompt"] for row in session.generate().rows]
        session.generate()
        session.load_state(path)
        assert [row["prompt"] for row in session.generate().rows] == prompts


# The primitives of a step.

EXACT = {  # with our own names alone, which every algorithm reads
    **{name: value for name, value in SMALL.items() if name not in ("num_generations", "max_completion_length")},
    "actor_rollout_ref.rollout.n": 2,
    "data.max_response_length": 4,
    "data.seed": 3,
    "train_batch_size": 4,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
}


NO_KL = {"actor_rollout_ref.actor.use_kl_loss": False}
ON_RAY = {**NO_KL, "worker_group": "ray", "trainer.n_gpus_per_node": 2, "ray_init": {"num_cpus": 2}}


def scores_of(answers):
    return right(answers.texts, [row["answer"] for row in answers.rows])


def plain_step(session, answers):
    session.advantages(answers, scores_of(answers))
    return session.update(answers)


def with_cispo(session, answers):
    advantages = session.advantages(answers, scores_of(answers))
    return session.update(answers, advantages, loss="cispo")


def in_two_halves(session, answers):
    advantages = session.advantages(answers, scores_of(answers))
    metrics = session.forward_backward(answers, advantages)
    return metrics | session.optim_step()


def learn_what_does_not_divide_over_two_devices(session):
    """Three answers to one prompt: one engine has none, and one device has two."""
    answers = session.generate(["1+1="], n=3)
    before = [float(each.sum()) for each in session.log_probs(answers)]
    session.forward_backward(answers, [1.0, 0.0, 0.0])
    session.optim_step(learning_rate=1e-2)
    session.update(answers, [1.0, 0.0, 0.0])
    assert float(session.log_probs(answers)[0].sum()) > before[0]


@pytest.mark.parametrize(
    ("algorithm", "further", "of_run", "step"),
    [
        ("grpo", {}, {}, plain_step),
        ("rloo", {"beta": 0.1, "lora_rank": 2}, {}, in_two_halves),
        ("ppo", {"actor_rollout_ref.rollout.n": 1}, {}, plain_step),
        ("grpo", {**NO_KL, "actor_rollout_ref.actor.ppo_mini_batch_size": 2}, {"loss_mode": "cispo"}, with_cispo),
        ("grpo", ON_RAY, {}, in_two_halves),
    ],
    ids=["on_policy_with_reference", "rloo_with_kl_and_lora", "critic", "two_mini_batches_and_loss_of_a_call", "ray"],
)
def test_a_loop_of_primitives_gives_bit_for_bit_what_a_run_gives(algorithm, further, of_run, step, model, tmp_path):
    settings = {**EXACT, **further}
    in_process = settings if further is not ON_RAY else EXACT | NO_KL
    run = verl_memopt.train(model, ROWS, right, algorithm=algorithm, steps=2, run_dir=tmp_path / "run", **in_process, **of_run)
    rows = run.metrics
    with verl_memopt.session(model, ROWS, algorithm=algorithm, steps=2, run_dir=tmp_path / "session", **settings) as session:
        for number in range(2):
            metrics = step(session, session.sample())
            session.sync()
            shared = [
                name for name in metrics if name in rows[number] and name.startswith(("actor/", "critic/", "response_length"))
            ]
            assert len(shared) > (10 if step is not in_two_halves else 4), shared
            expected = {name: rows[number][name] for name in shared}
            # Two devices add in another order.
            assert {name: metrics[name] for name in shared} == (
                pytest.approx(expected, rel=1e-4, abs=1e-6) if further is ON_RAY else expected
            )
        if further is ON_RAY:
            learn_what_does_not_divide_over_two_devices(session)


def test_a_session_whose_block_has_ended_and_a_temperature_that_is_too_small_are_named(model, tmp_path):
    with verl_memopt.session(model, ROWS, run_dir=tmp_path / "run", **EXACT) as session:
        for temperature in (1e-300, -1, True, float("nan")):
            with pytest.raises(ConfigError, match=r"^generate\(temperature=.*give 0, or a number of at least 0\.0001"):
                session.generate(["1+1="], temperature=temperature)
    for call in (session.generate, session.save_state, session.sync, lambda: session.save(tmp_path / "model")):
        with pytest.raises(ConfigError, match=r"^the session is closed.*resume=True"):
            call()


def test_a_session_goes_on_from_a_saved_state_and_a_run_does_too(model, tmp_path):
    settings = {**EXACT, **NO_KL, "max_actor_ckpt_to_keep": None}

    def one(session):
        answers = session.generate()
        metrics = in_two_halves(session, answers)
        session.sync()
        return answers.texts, metrics

    with verl_memopt.session(model, ROWS, steps=3, run_dir=tmp_path / "first", **settings) as session:
        one(session)
        path = session.save_state()
        after = [one(session), one(session)]
        session.load_state(path)
        assert (session.step, [one(session), one(session)]) == (1, after)
        answers = session.generate()
        session.forward_backward(answers, [1.0] * len(answers))
        with pytest.raises(ConfigError, match=r"^update: a gradient .* optim_step"):
            session.update(answers, [1.0] * len(answers))
        assert session.optim_step(learning_rate=0.25)["actor/lr"] == 0.25
        with pytest.raises(ConfigError, match=r"^optim_step: there is no gradient"):
            session.optim_step()
        with pytest.raises(CheckpointError, match=r"^load_state: .*not a checkpoint"):
            session.load_state(tmp_path)
    elsewhere = {**settings, "data.seed": None, "actor_rollout_ref.rollout.seed": None}
    with verl_memopt.session(model, ROWS, steps=3, run_dir=tmp_path / "second", **elsewhere) as session:
        session.load_state(path)
        assert [one(session), one(session)] == after
    with verl_memopt.session(model, ROWS, steps=3, run_dir=tmp_path / "first", resume=True, **settings) as session:
        assert (session.step, one(session)) == (1, after[0])
    run = verl_memopt.train(model, ROWS, right, steps=3, run_dir=tmp_path / "first", resume=True, **settings)
    assert [row["step"] for row in run.metrics] == [2, 3]
    assert [row["actor/loss"] for row in run.metrics] == [metrics["actor/loss"] for _, metrics in after]


def test_a_session_answers_prompts_updates_with_advantages_of_the_callers_and_saves(model, tmp_path):
    from transformers import AutoModelForCausalLM

    settings = {
        **EXACT,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "clip_cov_ub": 1.0,
    }
    with verl_memopt.session(model, run_dir=tmp_path / "session", **settings) as session:
        chat = [{"role": "user", "content": "1+1="}]
        answers = session.generate(["1+2=", chat, {"prompt": "3+4=", "answer": "7"}], n=2)
        assert (len(answers), len(answers.texts), answers.rows[4]["answer"]) == (6, 6, "7")
        assert answers.rows[4].keys() >= {"prompt", "data_source", "ground_truth"}  # as a reward function f(answer, row) gets
        with pytest.raises(ConfigError, match="there are no prompts"):
            session.generate()
        before = session.log_probs(answers)
        assert [each.numel() for each in before] == [len(ids) for ids in answers.response_ids]
        session.update(answers, [1.0] * 6)
        after = session.log_probs(answers)
        assert sum(each.sum() for each in after) > sum(each.sum() for each in before)
        for wrong in ([1.0], [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 6):
            with pytest.raises(ConfigError, match=r"^update: "):
                session.update(answers, wrong)
        with pytest.raises(ConfigError, match=r"^loss='cisp': there is no such loss. Is it cispo"):
            session.update(answers, [1.0] * 6, loss="cisp")
        with pytest.raises(ConfigError, match=r"clip_cov_lb=1\.0, .*clip_cov_ub=1\.0: no covariance"):
            session.update(answers, [1.0] * 6, loss="clip_cov")
        assert session.update(answers, [1.0] * 6, loss="kl_cov")["actor/skipped_updates"] == 0.0
        greedy = session.generate([chat], n=2, temperature=0)
        assert greedy.texts[0] == greedy.texts[1]
        for wrong in (-1, True, "hot"):
            with pytest.raises(ConfigError, match=r"^generate\(temperature=.*at least 0"):
                session.generate([chat], temperature=wrong)
        with pytest.raises(ConfigError, match=r"^update: these answers were sampled with temperature=0, .*at temperature 1\.0"):
            session.update(greedy, [1.0, 1.0])
        with pytest.raises(RewardError, match="2 scores for 6 answers"):
            session.advantages(answers, [1.0, 2.0])
        with pytest.raises(ConfigError, match="no reference"):
            session.log_probs(answers, reference=True)
        folder = session.save(tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size > 0


def test_a_loss_that_is_a_function_learns_as_the_one_of_a_file(model, tmp_path):
    weight, updates = 0.5, {}

    def weighted(log_prob, advantages):
        return -weight * advantages * log_prob

    def joined(log_prob):
        return log_prob - log_prob.mean()

    (tmp_path / "loss.py").write_text("def weighted(log_prob, advantages):\n    return -0.5 * advantages * log_prob\n")
    of_file = {"policy_loss.loss_mode": "custom", "policy_loss.custom.path": str(tmp_path / "loss.py")}
    own = {f"actor_rollout_ref.actor.{name}": value for name, value in {**of_file, "policy_loss.custom.name": "weighted"}.items()}
    for name, settings, loss in (("function", {}, weighted), ("file", own, None)):
        with verl_memopt.session(model, run_dir=tmp_path / name, **EXACT, **NO_KL, **settings) as session:
            answers = session.generate(["1+2=", "3+4="], n=2)
            if loss is not None:
                with pytest.raises(TrainingError, match=r"policy_loss\.custom\.name=loss in .*depends on the other tokens"):
                    session.update(answers, [1.0, 0.5, -1.0, 0.0], loss=joined)
            updates[name] = session.update(answers, [1.0, 0.5, -1.0, 0.0], loss=loss)
    assert updates["function"]["actor/grad_norm"] == updates["file"]["actor/grad_norm"] > 0


def test_an_update_with_the_callers_advantages_corrects_and_masks_as_a_run_does(model, tmp_path):
    settings = {
        **EXACT,
        **NO_KL,
        "data.max_response_length": 1,  # so that every answer is cut
        "algorithm.mask_truncated_responses": True,
        "algorithm.rollout_correction.rollout_is": "token",
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
    }
    with verl_memopt.session(model, run_dir=tmp_path / "session", **settings) as session:
        answers = session.generate(["1+2=", "3+4="], n=2)
        before = session.log_probs(answers)
        metrics = session.update(answers, [1.0, -1.0, 2.0, 0.5])
        after = session.log_probs(answers)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["actor/grad_norm"] == 0.0
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("algorithm", "prompts", "n"),
    [("grpo", 1, 3), ("grpo", 6, 2), ("ppo", 1, 3)],
    ids=["more_answers", "more_prompts", "more_answers_with_a_critic"],
)
def test_an_update_learns_every_answer_whatever_their_number(algorithm, prompts, n, model, tmp_path):
    """A step of the dataset has 4 prompts with 2 answers each."""
    with verl_memopt.session(model, algorithm=algorithm, run_dir=tmp_path / "session", **EXACT, **NO_KL) as session:
        answers = session.generate([f"{number}+1=" for number in range(prompts)], n=n)
        session.advantages(answers, [1.0] * len(answers))
        metrics = session.update(answers, [0.0] * (len(answers) - 1) + [1.0])
        assert metrics["actor/grad_norm"] > 0, "the last answer is learned"


def test_a_wrong_argument_of_a_primitive_is_one_line_and_changes_nothing(model, tmp_path):
    settings = {**EXACT, **NO_KL, "data.prompt_key": "question", "train_batch_size": 40}
    with verl_memopt.session(model, run_dir=tmp_path / "session", **settings) as session:
        for n in (0, -1, "2", 1.5):
            with pytest.raises(ConfigError, match=r"^generate\(n=.*at least 1"):
                session.generate(["1+1="], n=n)
        with pytest.raises(ConfigError, match=r"^generate: '1\+1=' is one text. Give a list"):
            session.generate("1+1=")
        assert session.step == 0
        answers = session.generate(["1+1="], n=2)
        for scores in ([None, 1.0], ["x", 1.0]):
            with pytest.raises(RewardError, match=r"^advantages: the score of answer 0 is .*Give a number"):
                session.advantages(answers, scores)
        for advantages in ([None, 1.0], ["x", 1.0]):
            with pytest.raises(ConfigError, match=r"^forward_backward: the advantage of answer 0 is .*Give one number"):
                session.forward_backward(answers, advantages)
        with pytest.raises(ConfigError, match=r"^forward_backward: the advantage of answer 1 is nan. Give finite numbers"):
            session.forward_backward(answers, [1.0, float("nan")])
        session.forward_backward(answers, [1.0, 1.0])
        for rate in ("x", -1.0, float("nan")):
            with pytest.raises(ConfigError, match=r"^optim_step: learning_rate=.* at least 0"):
                session.optim_step(rate)
        assert session.optim_step()["actor/lr"] == pytest.approx(EXACT["actor_rollout_ref.actor.optim.lr"])
        notes = tmp_path / "mine" / "notes.txt"
        notes.parent.mkdir()
        notes.write_text("mine")
        for path in (notes, notes.parent):
            with pytest.raises(ConfigError, match=r"^save: .* is not the folder of a saved model: notes.txt"):
                session.save(path)
        assert notes.read_text() == "mine"
        assert session.save(session.save(tmp_path / "model")) == tmp_path / "model"


# The notebook.

NOTEBOOK = Path(__file__).parents[1] / "examples" / "memory_optimization" / "quick_start.ipynb"


def cells_of(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs_from_the_start_to_the_charts_as_its_outputs_show(toy, tmp_path):
    """In a folder that has the toy task; ``tools.notebook`` stands for Jupyter, which runs cells in one process."""
    (tmp_path / "toy").symlink_to(toy)
    shutil.copy(NOTEBOOK, tmp_path / "mine.ipynb")
    command = [sys.executable, "-m", "tools.notebook", "mine.ipynb"]
    environment = {**os.environ, "PYTHONPATH": str(NOTEBOOK.parents[2])}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300)
    for cells in (cells_of(tmp_path / "mine.ipynb"), cells_of(NOTEBOOK)):
        charts, scores = (each["outputs"][0]["data"] for each in cells[3:5])
        assert "".join(charts["text/html"]).count("<img") == 3
        learned = ast.literal_eval(scores["text/plain"][0])
        assert len(learned) == 8
        assert max(learned[4:]) > learned[0]


ENDLESS = """
import verl_memopt
verl_memopt.train({model!r}, {rows!r}, lambda answer: float(answer == "2"), steps=100000, run_dir={folder!r}, **{small!r})
"""


def test_a_call_that_is_interrupted_in_the_middle_leaves_no_process(model, tmp_path):
    folder = tmp_path / "run"
    process = shared_server().fork(["-c", ENDLESS.format(model=model, rows=ROWS, folder=str(folder), small=SMALL)])
    wait_for_step(process, folder, 0)
    relatives = psutil.Process(process.pid).children(recursive=True)
    assert relatives, "there are reward processes"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert re.search(r"KeyboardInterrupt: the run in .* resume=True", output), output[-2000:]
    assert process.returncode != 0
    assert all_gone([each.pid for each in relatives])
    assert list(folder.glob("global_step_*")), "it has saved"


# A teacher.

OWN = {"distill.teacher_prompt": "{answer} {prompt}"}
"""The policy is its own teacher, at a prompt that tells more."""
OFFLOADED = {"teacher.fsdp_config.param_offload": True, "distill.top_k": 4}


def from_teacher(session, answers):
    return session.update(answers)


def from_teacher_in_two_halves(session, answers):
    return session.forward_backward(answers) | session.optim_step()


def from_teacher_and_scores(session, answers):
    session.advantages(answers, scores_of(answers))
    return session.update(answers)


@pytest.mark.parametrize(
    ("algorithm", "further", "step"),
    [
        (None, {}, from_teacher),
        (None, OFFLOADED, from_teacher_in_two_halves),
        ("distill", OWN, from_teacher_in_two_halves),
        (None, {"distill.divergence": "sampled", "actor_rollout_ref.actor.ppo_mini_batch_size": 2}, from_teacher),
        ("grpo", {"distill.divergence": "jsd", "distill.coef": 0.5}, from_teacher_and_scores),
    ],
    ids=["exact", "top_k_offloaded_two_halves", "own_teacher_two_halves", "sampled_two_mini_batches", "beside_rewards"],
)
def test_a_session_learns_from_a_teacher_as_a_run_does(algorithm, further, step, model, tmp_path, teacher):
    of_teacher = {} if further is OWN else {"teacher": teacher, "teacher.fsdp_config.dtype": "fp32"}
    given = {"algorithm": algorithm, "steps": 2, **EXACT, **NO_KL, **of_teacher, **further}
    rewards = right if algorithm == "grpo" else None
    rows = verl_memopt.train(model, ROWS, rewards, run_dir=tmp_path / "run", **given).metrics
    with verl_memopt.session(model, ROWS, run_dir=tmp_path / "session", **given) as session:
        for number in range(2):
            metrics = step(session, session.generate())
            session.sync()
            shared = {name for name in metrics if name in rows[number] and name.startswith(("actor/", "distill/"))}
            assert shared & {"actor/distill_loss", "distill/kl_mean"}
            assert {name: metrics[name] for name in shared} == {name: rows[number][name] for name in shared}


def naive_log_probs(folder, prompt, response):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        log_probs = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0].float()


@pytest.mark.parametrize("further", [{}, OFFLOADED, {"distill.divergence": "sampled"}], ids=["exact", "top_k", "sampled"])
def test_a_session_tells_the_teachers_log_prob_of_each_token(further, model, tmp_path, teacher):
    settings = {**EXACT, **further, "teacher.fsdp_config.dtype": "fp32", "teacher.fsdp_config.param_offload": True}
    prompts = [{"prompt": "1+1=", "hint": "2"}, {"prompt": "3+4=", "hint": "7"}]
    told = {"distill.teacher_prompt": "{hint} {prompt}"}
    with verl_memopt.session(model, teacher=teacher, run_dir=tmp_path / "run", **settings, **told) as session:
        answers = session.generate(prompts)
        found = session.teacher_log_probs(answers)
        session.update(answers)  # the states are those of the update, whatever was asked before
        assert [own.tolist() for own in session.teacher_log_probs(answers)] == [own.tolist() for own in found]
        tokenizer = AutoTokenizer.from_pretrained(model)
        for row, response, own in zip(answers.rows, answers.response_ids, found, strict=True):
            prompt = tokenizer(f"{row['hint']} {row['prompt']}").input_ids
            torch.testing.assert_close(own, naive_log_probs(teacher, prompt, response), rtol=1e-5, atol=1e-5)
    with verl_memopt.session(model, run_dir=tmp_path / "alone", **EXACT) as session:
        answers = session.generate(["1+1="])
        with pytest.raises(ConfigError, match=r"^teacher_log_probs: the session has no teacher.*teacher="):
            session.teacher_log_probs(answers)
