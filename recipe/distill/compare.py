"""Compare ways to teach the toy student over several seeds, at equal steps, and draw their curves of held-out accuracy.

python recipe/distill/compare.py runs/distill_toy --seeds 5 --out runs/distill_compare

Each step has the same prompts, batch size, learning rate and optimizer in all runs, and samples eight answers to each prompt.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from verl_memopt.cli import main as verl_memopt
from verl_memopt.data.sources import read_source
from verl_memopt.data.warm_up import greedy_accuracy
from verl_memopt.observe.chart_style import figure, legend_beside, save, style, whole_steps
from verl_memopt.observe.log_setup import setup_logging

HERE = Path(__file__).parent
SCORE = "val-core/toy/arithmetic/reward/mean@1"
SUPERVISED = "supervised, the right answers"
EVERY = 2
"""Steps between two measurements."""
WAYS = {
    "distillation, reverse KL": (),
    "distillation, sampled token": ("distill.divergence=sampled",),
    "its own teacher, with the sum": (
        "teacher.model.path=null", "distill.teacher_prompt=\"{answer} {prompt}\"", "data.max_prompt_length=24",
    ),
    "RLOO": ("algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.policy_loss.loss_mode=sequence"),
    "RLOO and distillation": (
        "algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.policy_loss.loss_mode=sequence", "distill.coef=1",
    ),
    SUPERVISED: (
        "algorithm.adv_estimator=sft", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg", "actor_rollout_ref.rollout.n=1",
        "data.response_key=extra_info.answer", f"trainer.save_freq={EVERY}", "trainer.max_actor_ckpt_to_keep=null",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    ),
}  # fmt: skip
"""Name of a way -> settings beside those of toy.yaml."""


def run(toy: Path, folder: Path, way: str, seed: int, steps: int) -> dict[int, float]:
    """Train once, and return step -> share of held-out sums that are answered right."""
    settings = [
        f"actor_rollout_ref.model.path={toy}/student", f"data.train_files={toy}/train.parquet",
        f"data.val_files={toy}/val.parquet", f"trainer.default_local_dir={folder}", f"data.seed={seed}",
        f"trainer.total_training_steps={steps}", f"trainer.test_freq={EVERY}", "trainer.save_freq=-1",
        "trainer.save_final_model=false", "trainer.worker_group=local", "actor_rollout_ref.rollout.name=hf",
        "trainer.logger=[jsonl]", "trainer.track_memory_every_steps=0", "trainer.resume_mode=disable",
        "trainer.log_val_generations=0",
    ]  # fmt: skip
    if not any(setting.startswith("teacher.model.path=") for setting in WAYS[way]):
        settings.append(f"teacher.model.path={toy}/teacher")
    code = verl_memopt(["train", "--config-dir", str(HERE), "--config-name", "toy", *settings, *WAYS[way]])
    if code:
        sys.exit(code)
    if way == SUPERVISED:  # such a run has no engine, so the models that it saved answer the sums
        models = {step: folder / f"global_step_{step}" / "actor" / "huggingface" for step in range(EVERY, steps + 1, EVERY)}
        return {step: answered(model, toy) for step, model in {0: toy / "student", **models}.items()}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[SCORE] for row in rows if SCORE in row}


def answered(model: Path, toy: Path) -> float:
    rows = read_source(str(toy / "val.parquet"), "val", "toy")
    return greedy_accuracy(model, [(row["prompt"][-1]["content"], row["extra_info"]["answer"]) for _, row in rows])


def table(curves: Mapping[str, Sequence[Mapping[int, float]]], steps: Sequence[int]) -> Iterator[str]:
    yield f"| way | {' | '.join(f'step {step}' for step in steps)} |"
    yield f"| --- | {' | '.join('---:' for _ in steps)} |"
    for way, runs in curves.items():
        scores = ([curve[step] for curve in runs] for step in steps)
        yield f"| {way} | {' | '.join(f'{mean(own):.3f} +- {stdev(own) if len(own) > 1 else 0:.3f}' for own in scores)} |"


def draw(curves: Mapping[str, Sequence[Mapping[int, float]]], path: Path) -> Path:
    drawing = figure(8.5, 4)
    axes = drawing.subplots()
    for way, runs in curves.items():
        steps = sorted(runs[0])
        scores = [[curve[step] for curve in runs] for step in steps]
        (line,) = axes.plot(steps, [mean(own) for own in scores], label=way)
        axes.fill_between(steps, [min(own) for own in scores], [max(own) for own in scores], color=line.get_color(), alpha=0.15)
    style(axes, "Held-out sums answered right (mean, and range over seeds)", "step", "share")
    whole_steps(axes)
    legend_beside(axes)
    return save(drawing, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("toy", type=Path, help="folder that make_toy.py has made")
    parser.add_argument("--seeds", type=int, default=5, help="number of runs of each way (default: 5)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default: 20)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, curves.json and curves.png")
    parsed = parser.parse_args(arguments)
    setup_logging()
    curves: dict[str, list[dict[int, float]]] = {way: [] for way in WAYS}
    for seed in range(1, parsed.seeds + 1):
        for number, way in enumerate(WAYS):
            curves[way].append(run(parsed.toy, parsed.out / f"{number}_{seed}", way, seed, parsed.steps))
    (parsed.out / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
    shown = [step for step in (0, 2, 4, 6, 10, 20, 40) if step <= parsed.steps]
    sys.stdout.write("\n".join([*table(curves, shown), str(draw(curves, parsed.out / "curves.png")), ""]))


if __name__ == "__main__":
    main()
