"""``python -m benchmarks.gpu.vllm_part --out FOLDER``: FSDP2's trainer and vLLM in one process on one card, step by step.

Each step runs in a process of its own under a bound of seconds, and writes each figure as soon as it has it: a line of JSON to
``vllm.jsonl``, a line of text to ``vllm.txt``. A step that fails, hangs or kills its process is a line with its error, its log
stays, and the next one begins. Models have the shapes of Qwen3 with random weights that are made here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.gpu.reach_cases import Case, make_model_folder
from benchmarks.gpu.train import LOCAL, figures, toy_settings, write_prompts
from verl_memopt.config.loader import load_settings
from verl_memopt.distributed.device import (
    empty_cache,
    is_gpu,
    local_device,
    memory_allocated,
    memory_info,
    memory_reserved,
    resolve_device,
    synchronize,
)
from verl_memopt.model.tiny import make_tiny_model
from verl_memopt.observe.phase import GIB
from verl_memopt.rollout.engine import EnginePlace, Generation, RolloutEngine, build_engine, train_sampling

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
EOS = 2
KEPT = (f"{ACTOR}.fsdp_config.split_master_weights=true", f"{ROLLOUT}.share_weights=true")
"""One copy of the weights, for trainer and engine."""
CAPTURED = [1, 2, 4, 8, 16, 32]
"""Rows of a batch for which a CUDA graph is captured."""
PARTIAL = "{mode:0,cudagraph_mode:FULL_DECODE_ONLY,cudagraph_capture_sizes:[1,2,4,8,16,32]}"
"""CUDA graphs of decoding without torch.compile, which takes half a minute."""


@dataclass(frozen=True)
class Work:
    """What a step gets."""

    asked: argparse.Namespace
    folder: Path
    """Models, shared by the steps and removed at the end."""
    device: torch.device
    note: Callable[..., None]
    """``note(text, **figures)`` writes a line of evidence."""

    def model(self, shape: str) -> Path:
        """Return the folder of a model of Qwen3's shape in bfloat16, made when it is first asked for."""
        folder = self.folder / shape
        if not folder.exists():
            asked = self.asked
            case = Case(shape, "full", layers=asked.layers, vocabulary=asked.vocabulary, shrink=asked.shrink)
            aside = self.folder / f"{shape}.partial"  # a step that is killed leaves no half a model to the next
            randomize(make_model_folder(case.model, aside), self.device)
            aside.rename(folder)
        return folder

    def tiny(self) -> Path:
        return make_tiny_model(self.folder / "tiny")

    def engine_settings(self, graphs: str = "off") -> list[str]:
        """Return how vLLM runs here: on a GPU by the Triton backend. A CPU captures no graphs."""
        kwargs = f"{ROLLOUT}.engine_kwargs.vllm"
        how = {"on": [f"{ROLLOUT}.cudagraph_capture_sizes={CAPTURED}"], "partial": [f"{kwargs}.compilation_config={PARTIAL}"]}
        if not is_gpu(self.device):
            return [f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.kv_cache_memory_gb=0.0625"]
        eager = f"{ROLLOUT}.enforce_eager={str(graphs == 'off').lower()}"
        return [eager, f"{ROLLOUT}.kv_cache_memory_gb=4", f"{kwargs}.attention_backend=TRITON_ATTN", *how.get(graphs, [])]

    def engine(self, model: Path, *overrides: str) -> tuple[RolloutEngine, Any]:
        """Start an engine and return it with its settings."""
        settings = load_settings(
            "rloo_trainer",
            [
                "data.train_files=none", "data.val_files=null", f"actor_rollout_ref.model.path={model}", f"{ROLLOUT}.name=vllm",
                f"data.max_prompt_length={self.asked.prompt}", f"data.max_response_length={self.asked.response}", LOCAL[0],
                f"{ACTOR}.use_dynamic_bsz=true", f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.load_format=auto",
                f"{ROLLOUT}.ignore_eos=true", *overrides,
            ],
        )  # fmt: skip
        rollout = settings.actor_rollout_ref.rollout
        place = EnginePlace(
            rank=0, world_size=1, local_rank=0, tensor_parallel_size=1, device=self.device, model_folder=str(model),
            tokenizer_folder=str(model), trust_remote_code=False, eos_token_ids=(EOS,),
        )  # fmt: skip
        return build_engine(rollout, place), rollout

    def prompts(self, rows: int) -> list[list[int]]:
        length = self.asked.prompt
        return [[3 + (row * 31 + place * 7) % 290 for place in range(length - row % min(length, 9))] for row in range(rows)]

    def memory(self) -> dict[str, int]:
        """Return device bytes: live and reserved by torch's allocator, and in use by the driver. Empty on a CPU."""
        if not is_gpu(self.device):
            return {}
        synchronize(self.device)
        free, total = memory_info(self.device)
        live, reserved = memory_allocated(self.device), memory_reserved(self.device)
        return {"allocated_bytes": live, "reserved_bytes": reserved, "driver_bytes": total - free}


def in_gib(sizes: Mapping[str, int]) -> str:
    shown = [f"{name.removesuffix('_bytes')} {size / GIB:.2f} GiB" for name, size in sizes.items()]
    return ", ".join(shown) or "not counted on a CPU"


def randomize(folder: Path, device: torch.device) -> None:
    """Give the matrices of a model folder random values. A product of zeros has no gradient, and no token wins."""
    from safetensors.torch import load_file, save_file

    for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
        generator = torch.Generator(device).manual_seed(number)
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                tensors[name] = tensor.to(device).normal_(0, 0.02, generator=generator).cpu()
        save_file(tensors, file, metadata={"format": "pt"})


def engine(work: Work) -> None:
    """The engine alone: greedy tokens beside those of transformers, for a tiny model and Qwen3-0.6B's shape."""
    for name, model, dtype, most in (("tiny", work.tiny(), "float32", 0.01), ("0.6b", work.model("0.6b"), "bfloat16", 0.1)):
        began = time.perf_counter()
        started, rollout = work.engine(model, f"{ROLLOUT}.dtype={dtype}", f"{ROLLOUT}.do_sample=false", *work.engine_settings())
        seconds, prompts = time.perf_counter() - began, work.prompts(8)
        answer = started.generate(prompts, [0] * len(prompts), train_sampling(rollout))
        started.shutdown()
        equal, behind, apart = beside_transformers(model, getattr(torch, dtype), work.device, prompts, answer)
        work.note(
            f"{name} in {dtype}: starts in {seconds:.1f} s; {equal:.1%} of greedy tokens are those of transformers' generate; "
            f"under its logits each is at most {behind:.4f} nats behind the best, and log-probs differ by {apart:.4f} at most",
            model=name, dtype=dtype, start_seconds=seconds, equal_share=equal, behind_best_max=behind, log_prob_diff_max=apart,
        )  # fmt: skip
        assert behind <= most, f"{name}: a greedy token is {behind:.4f} nats behind the best, above {most}"


@torch.no_grad()
def beside_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device, prompts: list[list[int]], answer: Generation
) -> tuple[float, float, float]:
    """Return the share of equal tokens, how far a token is behind the best, and the largest difference of log-probs.

    The last two are taken along the engine's own answers, so that one tie does not count as many differences.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    equal, total, behind, apart = 0, 0, 0.0, 0.0
    for prompt, response, log_probs in zip(prompts, answer.response_ids, answer.log_probs or [], strict=True):
        ids = torch.tensor([prompt], device=device)
        length = {"max_new_tokens": len(response), "min_new_tokens": len(response)}
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length)
        own = whole[0, len(prompt) :].tolist()
        equal, total = equal + sum(a == b for a, b in zip(own, response, strict=True)), total + len(response)
        logits = model(torch.tensor([prompt + response], device=device)).logits[0, len(prompt) - 1 : -1].float()
        found = logits.log_softmax(-1)
        chosen = found.gather(-1, torch.tensor(response, device=device)[:, None])[:, 0]
        behind = max(behind, float((found.max(-1).values - chosen).max()))
        apart = max(apart, float((chosen - torch.tensor(log_probs, device=device)).abs().max()))
    return equal / total, behind, apart


def sleep(work: Work) -> None:
    """Sleep at levels 1 and 2, and wake: bytes by torch and by the driver, and the same answers. A CPU runs the hf engine."""
    from safetensors.torch import load_file

    from verl_memopt.rollout.vllm_process import asleep_in_vllm

    model = work.model("0.6b")
    name = "vllm" if is_gpu(work.device) else "hf"
    for level in (1, 2):
        asleep_at = [f"{ROLLOUT}.free_cache_engine=true", f"{ROLLOUT}.sleep_level={level}"]
        started, rollout = work.engine(model, *work.engine_settings(), f"{ROLLOUT}.name={name}", *asleep_at)
        prompts, sampling = work.prompts(8), train_sampling(rollout)

        def note(state: str, level: int = level) -> None:
            found = work.memory()
            asleep = asleep_in_vllm() if found else None
            shown = found if asleep is None else {**found, "allocated_but_asleep_bytes": asleep.allocated_bytes}
            work.note(f"level {level}, {state}: {in_gib(shown)}", level=level, state=state, **shown)

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            yield from ((key, tensor.to(work.device)) for key, tensor in load_file(model / "model.safetensors").items())

        before = started.generate(prompts, list(range(8)), sampling)
        note("awake")
        for turn in ("first", "second"):
            started.sleep()
            empty_cache(work.device)
            note(f"asleep, {turn} time")
            started.wake_up("weights")
            note("weights awake")
            if level == 2 or name == "hf":
                started.load_weights(weights())
            started.wake_up("kv_cache")
            note("awake again")
            same = started.generate(prompts, list(range(8)), sampling).response_ids == before.response_ids
            work.note(
                f"level {level}: answers after the {turn} sleep {'are the same' if same else 'differ'}", level=level, same=same
            )
            assert same, f"answers after a sleep at level {level} differ from those before"
        started.shutdown()


def sync(work: Work) -> None:
    """Weight sync from the trained model, checked after every sync by debug.mode=sync_check, without graphs."""
    train(work, "sync", [*work.engine_settings(), f"{ROLLOUT}.share_weights=false", "debug.mode=sync_check"])


def shared(work: Work) -> None:
    """The same with one copy of the weights."""
    train(work, "shared", [*work.engine_settings(), *KEPT, "debug.mode=sync_check"])


def shared_graphs(work: Work) -> None:
    """The same with one copy and CUDA graphs."""
    train(work, "shared_graphs", [*work.engine_settings("partial"), *KEPT, "debug.mode=sync_check"])


def toy(work: Work) -> None:
    """The toy task from its start to its end."""
    more = [
        *work.engine_settings(),
        f"{ROLLOUT}.max_logprob_diff=0.01",
        f"{ROLLOUT}.name=vllm",
        "trainer.save_freq=-1",
        "trainer.val_before_train=true",
    ]
    found = run(work, "toy", [*toy_settings(work.asked, work.folder), *more])
    before, after = found["validation"]
    work.note(f"toy: validation {before} before, {after} after {found['steps']} steps", before=before, after=after)
    assert after > before or work.asked.toy_steps < 20, f"the toy task did not learn: validation {before} before, {after} after"


def card(work: Work) -> None:
    """``memory=24g``: three whole steps of an 8B shape, generation included, with every weight trained."""
    fsdp, rows = f"{ACTOR}.fsdp_config", work.asked.answers
    settings = [
        *work.engine_settings(), *KEPT, "memory=24g", f"memory.device_limit_gb={work.asked.limit_gb}", f"{ROLLOUT}.n={rows}",
        "data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1", f"{ACTOR}.optim.state_dtype=int8",
        f"{ACTOR}.optim.in_backward=true", f"{ACTOR}.adaptive_token_budget=false",
        f"{fsdp}.mixed_precision.reduce_dtype=bfloat16",
        f"{fsdp}.param_offload=false", f"{fsdp}.grad_offload=false", "actor_rollout_ref.model.activation_offload_device_gb=1.5",
        f"{ACTOR}.ppo_max_token_len_per_gpu=10240", f"{ROLLOUT}.max_num_seqs={rows}",
    ]  # fmt: skip
    found = train(work, "card", settings, "8b", prompt=work.asked.prompt * 4, response=work.asked.response * 2)
    peaks = {name: found[name] for name in ("peak_allocated_bytes", "driver_peak_bytes") if found[name] is not None}
    for name, peak in peaks.items():
        assert peak < 24 * GIB, f"{name} is {peak / GIB:.2f} GiB, above 24"


def speed(work: Work) -> None:
    """Tokens a second of decoding at Qwen3-0.6B's shape: without graphs, with graphs, with graphs and torch.compile."""
    for graphs in ("off", "partial", "on") if is_gpu(work.device) else ("off",):
        rows, began = 32, time.perf_counter()
        started, rollout = work.engine(work.model("0.6b"), *work.engine_settings(graphs), f"{ROLLOUT}.max_num_seqs={rows}")
        start, rates = time.perf_counter() - began, []
        for seed in range(3):
            began = time.perf_counter()
            answer = started.generate(
                work.prompts(rows), list(range(seed, seed + rows)), replace(train_sampling(rollout), log_probs=False)
            )
            rates.append(sum(map(len, answer.response_ids)) / (time.perf_counter() - began))
        started.shutdown()
        work.note(
            f"graphs {graphs}: starts in {start:.1f} s; {rows} rows: {max(rates):,.0f} tokens/s at best, first {rates[0]:,.0f}",
            graphs=graphs, start_seconds=start, rows=rows, tokens_per_second=rates, eager=rollout.enforce_eager,
        )  # fmt: skip


STEPS: dict[str, tuple[Callable[[Work], None], float]] = {
    "engine": (engine, 90), "sleep": (sleep, 70), "sync": (sync, 80), "shared": (shared, 80),
    "shared_graphs": (shared_graphs, 90), "toy": (toy, 100), "card": (card, 180), "speed": (speed, 120),
}  # fmt: skip
"""Step -> its function and the seconds that it may take on a GPU, in their order. Whatever is left bounds it too."""


def train(
    work: Work, name: str, overrides: list[str], shape: str = "0.6b", prompt: int | None = None, response: int | None = None
) -> dict[str, Any]:
    """Train three steps of RLOO on random letters, with a reward that depends on chance."""
    asked, prompt, response = work.asked, prompt or work.asked.prompt, response or work.asked.response
    write_prompts(work.folder / "prompts.jsonl", asked.prompts * asked.steps, prompt)
    return run(work, name, [
        "--config-name", "rloo_trainer", f"data.train_files={work.folder}/prompts.jsonl", "data.val_files=null", "data.seed=1",
        "data.truncation=left", f"data.train_batch_size={asked.prompts}", f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}", f"actor_rollout_ref.model.path={work.model(shape)}", f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.n={asked.answers}", f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.ignore_eos=true",
        f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_mini_batch_size={asked.prompts}",
        f"{ACTOR}.fsdp_config.dtype=bfloat16", f"{ACTOR}.optim.lr=1e-4",
        f"custom_reward_function.path={ROOT}/benchmarks/gpu/visible_reward.py", f"trainer.total_training_steps={asked.steps}",
        "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false", *overrides,
    ])  # fmt: skip


def run(work: Work, name: str, arguments: list[str]) -> dict[str, Any]:
    """Run the training entry in this process. Note each step and phase, and the most that the driver had in use."""
    from verl_memopt.trainer.main_ppo import main as train_entry

    folder = work.folder / f"{name}_run"
    more = [f"trainer.default_local_dir={folder}", LOCAL[0], "trainer.logger=[console,jsonl]", "trainer.save_final_model=false"]
    with driver_peak(work.device) as peak:
        code = train_entry([*arguments, *more, "trainer.track_memory_every_steps=1"])
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    steps = [step for step in map(json.loads, lines) if "actor/loss" in step]
    for number, step in enumerate(steps, 1):
        kept = {key: step.get(key) for key in (
            "rollout/logprob_diff_mean", "rollout/logprob_diff_max", "actor/loss", "actor/grad_norm", "critic/rewards/mean",
            "timing_s/gen", "timing_s/update_actor", "timing_s/update_weights", "timing_s/step",
        )}  # fmt: skip
        if name != "toy" or number in (1, len(steps)):
            work.note(
                f"{name}, step {number}: " + ", ".join(f"{key} {value:.5g}" for key, value in kept.items() if value is not None),
                step_number=number,
                **kept,
            )
    if code != 0:
        sys.exit(code)  # the last line of the log is then the run's own error
    assert any(step["actor/grad_norm"] > 0 for step in steps), f"{name}: no step had a gradient"
    found = figures(json.loads((folder / "summary.json").read_text()), steps)
    phases = {
        phase: row["peak_allocated_bytes"] for phase, row in found["phases"].items() if row["peak_allocated_bytes"] is not None
    }
    found |= {"peak_allocated_bytes": max(phases.values(), default=None), "driver_peak_bytes": peak() or None}
    work.note(
        f"{name}: peaks by phase " + (", ".join(f"{phase} {size / GIB:.3f}" for phase, size in phases.items()) or "not counted")
        + f" GiB; the driver had at most {peak() / GIB:.2f} GiB in use",
        phases=found["phases"], driver_peak_bytes=found["driver_peak_bytes"], logprob_diff_max=found["logprob_diff_max"],
    )  # fmt: skip
    return found


@contextmanager
def driver_peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """Ask the driver twenty times a second how much is in use. Yields a function that returns the most so far; 0 on a CPU."""
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            free, total = memory_info(device)
            most[0] = max(most[0], total - free)

    thread = threading.Thread(target=watch, daemon=True)
    if is_gpu(device):
        thread.start()
    try:
        yield lambda: most[0]
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


# The steps as processes.


class Evidence:
    """Lines of evidence in a folder. Each is in its file before the call returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: str, text: str, **figures: Any) -> None:
        with (self.folder / "vllm.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        with (self.folder / "vllm.txt").open("a") as file:
            file.write(f"{step}: {text}\n")


def run_steps(commands: Mapping[str, Sequence[str]], bounds: Mapping[str, float], out: Path, seconds: float) -> dict[str, str]:
    """Run each step as a process, one after another, and write how it ended before the next begins.

    Args:
        commands: Step -> its command, in order.
        bounds: Step -> the seconds that it may take.
        out: Folder of the evidence.
        seconds: For all steps. A step that finds none left is not begun.

    Returns:
        Step -> ``done``, ``failed``, ``out of time`` or ``not begun``.
    """
    began, ended, evidence = time.monotonic(), {}, Evidence(out)
    for step, command in commands.items():
        left, status, error, start = seconds - (time.monotonic() - began), "not begun", "", time.monotonic()
        if left > 1:
            status, error = bounded(command, min(bounds[step], left), out / f"{step}.log")
        spent = round(time.monotonic() - start, 1)
        text = f"{status}, {spent} s" + (f": {error}" if error else "")
        evidence.write(step, text, status=status, seconds=spent, error=error or None)
        print(f"{step}: {text}", flush=True)
        ended[step] = status
    return ended


def bounded(command: Sequence[str], seconds: float, log: Path) -> tuple[str, str]:
    """Run a command with its output in a file, and kill it and what it started after so many seconds. Return (status, error)."""
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return "done", ""
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "nothing").strip()
    why = f"after {seconds:.0f} s" if code is None else f"exit code {code}"
    return "out of time" if code is None else "failed", f"{why}; {log.name} ends with: {last}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.vllm_part", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the evidence")
    parser.add_argument("--seconds", type=float, default=520, help="for all steps together")
    parser.add_argument("--steps", dest="chosen", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--only", choices=list(STEPS), help="run one step in this process, in --work")
    parser.add_argument("--work", type=Path, help="folder of the models")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--shrink", type=int, default=1, help="divide widths by this")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt; four times as many on the card of 24 GB")
    parser.add_argument("--response", type=int, default=256, help="tokens of an answer; twice as many on the card of 24 GB")
    parser.add_argument("--prompts", type=int, default=2, help="in a batch")
    parser.add_argument("--answers", type=int, default=16, help="to a prompt")
    parser.add_argument("--training-steps", dest="steps", type=int, default=3)
    parser.add_argument("--toy-steps", type=int, default=40)
    parser.add_argument(
        "--limit-gb", type=float, default=23.0, help="memory.device_limit_gb on the card of 24 GB; the rest is the context's"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps and return the exit code: 1 where one is not done."""
    given = list(sys.argv[1:] if argv is None else argv)
    asked = parse(given)
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.only:
        device = local_device(resolve_device("auto"), 0)
        evidence = Evidence(asked.out)
        STEPS[asked.only][0](Work(asked, asked.work, device, lambda text, **figures: evidence.write(asked.only, text, **figures)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step that runs is killed too
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, "-m", "benchmarks.gpu.vllm_part", *given, "--work", folder]
        commands = {name: [*own, "--only", name] for name in asked.chosen}
        slack = 4 if resolve_device("auto") == "cpu" else 1
        ended = run_steps(commands, {name: slack * bound for name, (_, bound) in STEPS.items()}, asked.out, asked.seconds)
    print((asked.out / "vllm.txt").read_text())
    return 0 if set(ended.values()) == {"done"} else 1


if __name__ == "__main__":
    sys.exit(main())
