"""``python -m benchmarks.checkpoint``: what checksums and syncs cost, against torch's own save of the same tensors.

README.md says what the contestants are. ``verify`` is the time to hash the finished checkpoint again, as a resume does before
anything starts. The last figure is what a step pays that saves nothing: one call of ``CheckpointStore.prove``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.common import CPU, seconds_of, write_json
from verl_memopt.distributed import file_records
from verl_memopt.distributed.device import join_process_group, leave_process_group
from verl_memopt.distributed.sharded_state import save_training_state
from verl_memopt.run import checkpoints
from verl_memopt.run.checkpoints import CheckpointStore, find_fault

CONTENTS = ["model", "optimizer", "extra"]
QWEN3_06B = {"layers": 28, "hidden": 1024, "attention": 2048, "key_value": 1024, "mlp": 3072, "vocabulary": 151_936}
PROVE_CALLS = 2_000
CONTESTANTS = ("torch", "checked", "unchecked")


def shaped_model(layers: int, vocabulary: int) -> torch.nn.Module:
    """Return a module whose parameters have the shapes of Qwen3-0.6B's weights, tied head, in float32."""
    shape = QWEN3_06B
    hidden, attention, key_value, mlp = shape["hidden"], shape["attention"], shape["key_value"], shape["mlp"]
    model = torch.nn.Module()
    projections = [(attention, hidden), (key_value, hidden), (key_value, hidden), (hidden, attention)]
    sizes = [*projections, (mlp, hidden), (mlp, hidden), (hidden, mlp)]
    model.register_parameter("embedding", torch.nn.Parameter(torch.empty(vocabulary, hidden).uniform_()))
    for layer in range(layers):
        for number, size in enumerate(sizes):
            model.register_parameter(f"layer_{layer}_{number}", torch.nn.Parameter(torch.empty(size).uniform_()))
    return model


def with_state(model: torch.nn.Module) -> AdamW:
    """Return an AdamW whose moments are filled, without the memory of a gradient for every parameter at once."""
    optimizer = AdamW(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        state = {"step": torch.tensor(1.0), "exp_avg": torch.rand_like(parameter), "exp_avg_sq": torch.rand_like(parameter)}
        optimizer.state[parameter] = state
    return optimizer


class NoHash:
    """Has blake3's methods and looks at nothing."""

    def update(self, data: object) -> None:
        """Do nothing."""

    def hexdigest(self) -> str:
        """Return a digest of nothing."""
        return "0" * 64


class Contest:
    """The contestants over one model. ``folder`` must lie on the disk that is measured."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, with_state(model), folder
        self.schedule = LambdaLR(self.optimizer, lambda step: 1.0)

    def torch(self) -> None:
        """Save with torch alone."""
        state = {"model": get_model_state_dict(self.model), "optimizer": get_optimizer_state_dict(self.model, self.optimizer)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(self.folder / "torch" / "dcp", per_thread_copy_ahead=0))
        torch.save({"rng": torch.get_rng_state()}, self.folder / "torch" / "extra.pt")

    def checked(self) -> None:
        """Save as a run does."""
        store = CheckpointStore(self.folder / "checked", None)
        aside = store.begin(1)
        records = save_training_state(aside / "actor", self.model, self.optimizer, self.schedule, CPU, CONTENTS)
        store.commit(1, {"step": 1}, 1, {f"actor/{name}": record for name, record in records.items()})

    def unchecked(self) -> None:
        """Save as a run does, but hash nothing and force to disk only what torch's own writer forces."""
        with ExitStack() as patches:
            patches.enter_context(patch.object(file_records, "blake3", NoHash))
            for name in ("sync_folders", "sync_folder"):
                patches.enter_context(patch.object(checkpoints, name, lambda folder: None))
            self.checked()
        (self.folder / "checked").rename(self.folder / "unchecked")

    def verify(self) -> None:
        """Hash what the last save wrote."""
        assert find_fault(self.folder / "checked" / "global_step_1") is None


def measure(contest: Contest, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant, one figure a round; the first round warms up and is not counted."""
    found: dict[str, list[float]] = {name: [] for name in (*CONTESTANTS, "verify")}
    for number in range(rounds + 1):
        # Who goes first changes, so that none always meets the pages of the same other still being written.
        turn = number % len(CONTESTANTS)
        for name in CONTESTANTS[turn:] + CONTESTANTS[:turn]:
            os.sync()
            spent = [(name, seconds_of(getattr(contest, name)))]
            if name == "checked":
                spent.append(("verify", seconds_of(contest.verify)))
            shutil.rmtree(contest.folder / name)
            for key, value in spent if number else ():
                found[key].append(value)
    return found


def paired_ratio(found: dict[str, list[float]], other: str) -> float:
    """Return the median over the rounds of ours divided by another contestant's seconds of the same round."""
    return round(statistics.median(ours / theirs for ours, theirs in zip(found["checked"], found[other], strict=True)), 3)


def prove_seconds(folder: Path) -> float:
    """Return the seconds of one call of ``prove`` for a checkpoint that is proven already, as a step makes it."""
    store = CheckpointStore(folder / "proved", 2)
    store.begin(1)
    store.commit(1, {}, 1)
    store.prove(1)
    return seconds_of(lambda: [store.prove(1) for _ in range(PROVE_CALLS)] and None) / PROVE_CALLS


def result_of(args: argparse.Namespace) -> dict[str, object]:
    """Run the contest and return what is written to the results file."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        join_process_group(CPU, 0, 1, "", 0, 60)
        try:
            model = shaped_model(args.layers, args.vocabulary)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            found = measure(Contest(model, Path(folder)), args.rounds)
        finally:
            leave_process_group()
        medians = {name: statistics.median(values) for name, values in found.items()}
        return {
            "parameters": parameters,
            "bytes": parameters * 12,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "rounds": args.rounds,
            "seconds": {name: [round(value, 3) for value in values] for name, values in found.items()},
            "medians": {name: round(value, 3) for name, value in medians.items()},
            "checked_over_torch": round(medians["checked"] / medians["torch"], 3),
            "paired_ratio": paired_ratio(found, "torch"),
            "checked_over_unchecked": round(medians["checked"] / medians["unchecked"], 3),
            "paired_ratio_unchecked": paired_ratio(found, "unchecked"),
            "prove_microseconds": round(prove_seconds(Path(folder)) * 1e6, 1),
        }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=QWEN3_06B["layers"], help="decoder blocks (default: all 28 of the 0.6B)")
    parser.add_argument("--vocabulary", type=int, default=QWEN3_06B["vocabulary"], help="rows of the embedding")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds (default: 7)")
    parser.add_argument("--folder", type=Path, default=None, help="where to save (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result here too")
    return parser.parse_args()


def main() -> None:
    args = parse()
    result = result_of(args)
    if args.json is not None:
        write_json(args.json, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
