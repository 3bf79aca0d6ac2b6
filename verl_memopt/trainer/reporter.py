"""Writes the record of a run: to the console, to the loggers and into its folder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import TracebackType

from verl_memopt.config.loader import to_yaml
from verl_memopt.observe.charts import DEVICE_LIMIT, draw_charts, environment, finish_summary
from verl_memopt.observe.console import RunConsole, memory_table, phase_rows, print_end, print_line
from verl_memopt.observe.files import append_rows
from verl_memopt.observe.log_setup import keep_console
from verl_memopt.observe.loggers import LoggingPlace, StepLoggers, build_loggers
from verl_memopt.observe.metrics import compile_metrics, memory_metrics, throughput_metrics, token_timings
from verl_memopt.observe.phase import PhaseClock, PhaseMemory
from verl_memopt.observe.run_folder import ENDED, RunFolder, program
from verl_memopt.observe.samples import Sample, dump_samples
from verl_memopt.observe.secrets import argument_without_secrets
from verl_memopt.plan.verdict import known_card
from verl_memopt.rewards.score import RewardResult
from verl_memopt.trainer.build import RunContext
from verl_memopt.trainer.replay import mode_of, tokenizer_digest, written_dump
from verl_memopt.trainer.rollouts import RowAnswers
from verl_memopt.trainer.step import StepResult
from verl_memopt.trainer.validate import Validation

logger = logging.getLogger(__name__)

SHOWN_SAMPLES = 4
"""Number of training samples that a step with a console table writes to generations.jsonl."""


class Reporter:
    def __init__(self, context: RunContext, clock: PhaseClock) -> None:
        self.context = context
        self.clock = clock
        trainer = context.settings.trainer
        self.folder = RunFolder(context.folder)
        resumed = context.continued_step
        aside = self.folder.begin(to_yaml(context.settings, secrets=False), resumed)
        first = 0 if context.checkpoint is None else context.checkpoint.step
        self.console = RunConsole(context.total_steps, first, trainer.table_every_steps)
        place = LoggingPlace(self.folder, self.console, trainer.project_name, trainer.experiment_name, resumed)
        self.dump = written_dump(context.settings, context.folder)
        self._digest = tokenizer_digest(context.environment.tokenizer) if self.dump or trainer.validation_data_dir else ""
        self.shows_memory = context.settings.debug.mode == "memory"
        self._carried: dict[str, float] = {}
        self.models: dict[Path, str] = {}
        """Folder of each model that the run saved for other programs -> description of the model."""
        self.is_complete = False
        """The run had finished all its steps before this start."""
        self._charts: Future[list[Path]] | None = None
        try:
            self.loggers: StepLoggers = build_loggers(trainer.logger, place)
        except BaseException:
            if resumed is None:
                self.folder.take_back(aside)
            raise
        self.folder.accept()
        keep_console(self.folder.path / "console.log")
        if aside is not None:
            self.say(f"an earlier run, which this run does not continue, is now in {aside}; delete it to free its space")

    def __enter__(self) -> Reporter:
        self.console.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.loggers.close(failed=kind is not None)
        finally:
            self.console.close()

    def say(self, text: str) -> None:
        self.console.say(text)

    def warn(self, step: int, texts: Sequence[str]) -> None:
        # Keep the warnings for the summary, which shows them again.
        for text in texts:
            logger.warning("step %d: %s", step, text)
        self.folder.add_warnings(step, texts)

    def phases(self, step: int, memories: Sequence[PhaseMemory]) -> dict[str, float]:
        if self.shows_memory and memories:
            self.console.console.print(memory_table(step, memories))
            append_rows(self.folder.phase_memory, phase_rows(step, memories))
        timings = self.clock.timings()
        self.folder.add_timeline(step, self.clock.take(), {memory.name: memory for memory in memories})
        return timings | memory_metrics(memories) | compile_metrics(memories)

    def step(
        self, step: int, epoch: int, result: StepResult, validation: Validation | None, memories: Sequence[PhaseMemory]
    ) -> dict[str, float]:
        metrics = {"training/global_step": float(step), "training/epoch": float(epoch), **result.metrics}
        if validation is not None:
            metrics |= validation.metrics
            self._keep_validation(step, validation)
        phases = self._carried | self.phases(step, memories)
        self._carried = {}
        metrics |= phases | token_timings(phases, result.response_tokens, result.total_tokens)
        metrics |= throughput_metrics(result.total_tokens, phases["timing_s/step"], self.context.environment.num_devices)
        self.loggers.log(step, metrics)
        every = self.context.settings.trainer.table_every_steps
        if every > 0 and step % every == 0:
            self.folder.add_generations(step, samples_of(result.answers, result.results)[:SHOWN_SAMPLES])
        if self.dump is not None:
            dump_samples(self.dump, step, samples_of(result.answers, result.results), self._digest)
        return metrics

    def saved(self, step: int, memories: Sequence[PhaseMemory]) -> None:
        # Add a save to the timeline. Its time and memory become metrics of the next logged step.
        self._carried = {name: value for name, value in self.phases(step, memories).items() if "save_checkpoint" in name}

    def first_validation(self, step: int, validation: Validation, memories: Sequence[PhaseMemory]) -> dict[str, float]:
        self._keep_validation(step, validation)
        metrics = validation.metrics | self.phases(step, memories)
        self.loggers.log(step, metrics)
        return metrics

    def started(self, step: int, memories: Sequence[PhaseMemory]) -> None:
        # Report the phases of the start now, so that they do not count for the first step.
        if memories:
            self.phases(step, memories)

    def draw_aside(self) -> None:
        # Draw the charts in a thread, while the workers end. :meth:`finish` waits for it, and raises its error.
        self._charts = ThreadPoolExecutor(1).submit(lambda: draw_charts(self.folder, limit=self._device_limit))

    @cached_property
    def _device_limit(self) -> int | None:
        card = known_card(self.context.settings)
        return None if card is None else card.num_bytes

    def finish(self) -> None:
        """Write summary and charts. Print the summary, the folders of the models and, as the last line, the run's folder.

        After a supervised run one more line prints the folder of the newest saved model.
        """
        facts = environment(self.context.environment.device, [*map(argument_without_secrets, sys.argv)])
        summary = finish_summary(self.folder, facts | {ENDED: True, DEVICE_LIMIT: self._device_limit})
        if self._charts is None:
            draw_charts(self.folder)
        else:
            self._charts.result()
        self.folder.seal()
        self.console.close()
        chat = f"{program()} chat"
        lines = [f"{what}: {folder}    Talk to it: {chat} {folder}" for folder, what in self.models.items()]
        if self.is_complete:
            lines.insert(0, self._nothing_trained())
        print_end(self.console.console, summary, self.folder.path, lines)
        mode, store = mode_of(self.context.settings), self.context.store
        saved = self.context.settings.actor_rollout_ref.actor.checkpoint.save_contents
        steps = store.steps() if mode.supervised and mode.is_whole and "hf_model" in saved else []
        if steps:
            print_line(self.console.console, str(store.folder(max(steps)) / "actor" / "huggingface"))

    def _nothing_trained(self) -> str:
        return (
            f"NOTHING WAS TRAINED: the run in this folder had already finished all its {self.context.total_steps} steps. The "
            "summary above is from that time. To continue the run, raise trainer.total_training_steps. To start a new run, give "
            "another folder, or set trainer.resume_mode=disable, which moves this run to previous/."
        )

    def _keep_validation(self, step: int, validation: Validation) -> None:
        samples = [sample for answers, results in validation.answers for sample in samples_of(answers, results)]
        shown = self.context.settings.trainer.log_val_generations
        if shown > 0:
            self.folder.add_generations(step, samples[:shown])
            self.loggers.log_samples(step, samples[:shown])
        folder = self.context.settings.trainer.validation_data_dir
        if folder is not None:
            dump_samples(Path(folder), step, samples, self._digest)


def samples_of(answers: RowAnswers, results: Sequence[RewardResult]) -> list[Sample]:
    # If there are no results, the score is None.
    generation, samples = answers.generation, []
    for place, row in enumerate(answers.rows):
        result = results[place] if results else None
        turns = {} if answers.conversations is None else answers.conversations[place].record()
        sample = Sample(
            uid=str(row.index),
            data_source=row.data_source,
            input=row.text,
            output=answers.texts[place],
            gts=row.ground_truth,
            score=None if result is None else result.score,
            prompt_ids=answers.prompt_ids[place],
            response_ids=generation.response_ids[place],
            extra={} if result is None else result.extra,
            finish_reason=generation.finish_reasons[place],
            rollout_log_probs=None if generation.log_probs is None else generation.log_probs[place],
            extra_info=row.extra_info,
            failed=result is not None and result.failed,
            messages=row.messages,
            **turns,
        )
        samples.append(sample)
    return samples
