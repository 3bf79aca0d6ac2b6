"""The common base of the trainers with TRL's arguments: it starts the run, and gives the models before and after it."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl_memopt import api
from verl_memopt.config.role_settings import Actor, Data
from verl_memopt.config.trl_defaults import DEFAULTS
from verl_memopt.config.trl_names import KL_IN_REWARD
from verl_memopt.config.trl_objective import KL_IN_LOSS
from verl_memopt.model.given import is_adapted
from verl_memopt.observe.own_files import model_files
from verl_memopt.records import json_of, usable_path
from verl_memopt.rewards.python_functions import with_names
from verl_memopt.trl.callbacks import Callbacks, last_metrics
from verl_memopt.trl.config import GRPOConfig, adapter_arguments, as_attributes, given_and_defaults
from verl_memopt.trl.logs import RewardNames
from verl_memopt.trl.models import (
    REFERENCE_PATH,
    ArgumentError,
    loaded,
    reference,
    starting_model,
    take_moved,
    take_trained,
    with_adapters,
)

if TYPE_CHECKING:
    from transformers import TrainerState

logger = logging.getLogger(__name__)

REFUSED = {
    "compute_metrics": "a validation reports rewards only. For other metrics return a dict of numbers from the reward function",
    "optimizers": "the optimizer is set by actor_rollout_ref.actor.optim. Leave it out",
    "data_collator": "the run encodes the rows. Leave it out",
    "formatting_func": "rows have a prompt, or messages. Format them first",
    "preprocess_logits_for_metrics": "a validation reports rewards only. Leave it out",
    "rollout_func": "the engine is chosen by actor_rollout_ref.rollout.name. Leave it out",
}
"""Arguments of TRL's trainers without a counterpart here: why, and the way out."""


ENTROPY = "actor_rollout_ref.actor.calculate_entropy"
"""Set to true unless the arguments say otherwise, because TRL always logs the entropy."""
LONGEST_PROMPT = 4096
"""Longest prompt of a conversation with tools in tokens, if the model's context is longer, and the arguments give no other."""
BUDGET = "ppo_max_token_len_per_gpu"
"""A forward must have room for the longest conversation."""
SUMS_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")
"""Values of ``loss_type`` that give a longer response more weight."""


class TrlTrainer:
    """A trainer with TRL's arguments. ``run`` is the last run (:class:`verl_memopt.api.Run`)."""

    algorithm: ClassVar[str] = ""
    config: ClassVar[type[GRPOConfig]] = GRPOConfig
    learns_rewards: ClassVar[bool] = True
    aux_loss_enabled: ClassVar[bool] = False
    """Whether the loss has a load-balancing term for experts. It never has one here."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: Any = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        tools: Any = None,
        environment_factory: Any = None,
        **others: Any,
    ) -> None:
        """Check the arguments. No process starts before :meth:`train`.

        Args:
            model: Folder or hub id of a model, or a model object of transformers or peft.
            reward_funcs: One reward function or several. A reward model (folder, hub id or object) may be given instead of a
                function.
            args: A config of TRL or of this package, or a dict with TRL's names.
            train_dataset: Rows with a ``prompt`` and other columns, as in TRL. None = the environment makes the tasks: its
                ``reset`` returns the prompt, and ``max_steps`` is required.
            eval_dataset: Held-out rows, or a dict of name -> rows.
            processing_class: The tokenizer. None = the tokenizer in the model's folder.
            reward_processing_classes: One entry per reward: the tokenizer of a reward model, and None for a function. A single
                reward needs no list.
            callbacks: Objects or classes of transformers' ``TrainerCallback``.
            optimizers: Must be None.
            peft_config: A LoraConfig of peft, or a dict of its fields.
            quantization_config: A BitsAndBytesConfig of transformers, or a dict of its fields, for the base model under the
                adapters.
            tools: Functions that the model may call, with type hints and Google docstrings.
            environment_factory: A class with ``reset`` whose other public methods are tools, or a dict of name -> class.
            others: Other arguments of TRL. They are refused, except that those in ``REFUSED`` may be None.

        Raises:
            ConfigError: An argument is wrong or has no equal here.
        """
        self._refuse({"optimizers": optimizers, **others}, train_dataset, reward_funcs, environment_factory)
        self.args = as_attributes(args, self.config)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.reward_funcs = [] if reward_funcs is None else list(with_names(reward_funcs).values())
        self.reward_processing_classes = self._reward_tokenizers(reward_processing_classes)
        self.run: api.Run | None = None
        self._given, self._tokenizer, self._peft = model, processing_class, peft_config
        self._quantization, self._tools, self._environments = quantization_config, tools, environment_factory
        self._loaded = None if isinstance(model, str | Path) else model
        self._reference: Any = None
        self._settings()  # raise its errors now, not in train()
        self._check_code()
        self._warn_of_lengths()
        self._callbacks = Callbacks(callbacks or (), self.args, self._functions(), processing_class)

    # From the arguments to a run.

    def _refuse(self, others: Mapping[str, Any], train_dataset: Any, reward_funcs: Any, environments: Any) -> None:
        # One error reports all faults. It keeps TRL's own words, because a script may match them.
        found = [
            f"{name}: {REFUSED.get(name, f'{type(self).__name__} has no such argument. Remove it')}."
            for name, value in others.items()
            if name not in REFUSED or (value is not None and value != (None, None))
        ]
        if train_dataset is None and environments is None:
            found.append("train_dataset: `train_dataset` is required, and there is none. Give the rows to train on.")
        if self.learns_rewards and (reward_funcs is None or reward_funcs == []) and environments is None:
            found.append("reward_funcs: No reward source provided. Give a function, a list of functions, or a reward model.")
        if found:
            raise ArgumentError("\n".join(found))

    def _settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        settings, defaults = given_and_defaults(self.args)
        settings |= adapter_arguments(self._peft)
        if self._quantization is not None:
            settings["model_init_kwargs"] = {
                **(settings.get("model_init_kwargs") or {}), "quantization_config": self._quantization
            }  # fmt: skip
        return settings, defaults or DEFAULTS[self.config.algorithm]

    def _check_code(self) -> None:
        # Transformers would run the model's custom code in this process.
        file = Path(str(self._given)).expanduser() / "config.json"
        if not isinstance(self._given, str | Path) or self._trusted or not file.is_file():
            return
        if "AutoModelForCausalLM" in (json_of(file, dict[str, Any], "Save the model again.").get("auto_map") or {}):
            raise ArgumentError(
                f"model: {self._given} contains custom code, which would run in this process. Read it, and set "
                "trust_remote_code=True if you trust it."
            )

    def _warn_of_lengths(self) -> None:
        level, loss = (getattr(self.args, name, None) for name in ("importance_sampling_level", "loss_type"))
        # The importance ratio of a sequence does not depend on its length, but a loss that sums over tokens does.
        if level == "sequence" and loss in SUMS_TOKENS:
            logger.warning(
                "importance_sampling_level=sequence, loss_type=%s: the loss is a sum over tokens, so it "
                "weights each sequence by its completion length. With loss_type=grpo all sequences have the same weight", loss,
            )  # fmt: skip

    def _lengths(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the lengths for conversations with tools, whose prompts TRL does not limit.

        ``values``: the settings, and TRL's defaults of the others.
        """
        if (self._tools is None and self._environments is None) or any(name.endswith("max_prompt_length") for name in values):
            return {}
        from transformers import AutoConfig

        try:
            given = getattr(self._given, "config", None) or AutoConfig.from_pretrained(
                self._given, trust_remote_code=self._trusted
            )
        except (OSError, ValueError):  # the run reports it
            return {}
        response = values.get("max_completion_length") or Data.max_response_length
        context = getattr(given.get_text_config(), "max_position_embeddings", None) or LONGEST_PROMPT + response
        prompt = min(LONGEST_PROMPT, context - response)
        if prompt <= Data.max_prompt_length:
            return {}
        logger.info("max_prompt_length=%d, because TRL has no limit. Give max_prompt_length to set another one", prompt)
        fits = prompt + response <= Actor.ppo_max_token_len_per_gpu or any(name.endswith(BUDGET) for name in values)
        return {"max_prompt_length": prompt} | ({} if fits else {f"actor_rollout_ref.actor.{BUDGET}": prompt + response})

    def _functions(self) -> RewardNames:
        names = list(with_names(self.reward_funcs))
        weights = getattr(self.args, "reward_weights", None)
        return RewardNames(names, [1.0] * len(names) if weights is None else weights)

    def _reward_tokenizers(self, given: Any) -> list[Any]:
        tokenizers = [given] if given is not None and not isinstance(given, list | tuple) else list(given or [])
        if tokenizers and len(tokenizers) != len(self.reward_funcs):
            raise ArgumentError(
                f"reward_processing_classes: there are {len(tokenizers)} entries for {len(self.reward_funcs)} rewards. Give one "
                "per reward, and None for a function."
            )
        return tokenizers or [None] * len(self.reward_funcs)

    def _call(self, **changes: Any) -> api.Call:
        settings, defaults = self._settings()
        settings.pop("reward_weights", None)
        settings |= self._lengths({**defaults, **settings})
        resume = settings.pop(api.RESUME, None) or False
        if not any(name.endswith("calculate_entropy") for name in settings):
            settings[ENTROPY] = True
        arguments = {
            "model": self._given,
            "dataset": self.train_dataset,
            "rewards": self.reward_funcs or None,
            "eval_dataset": self.eval_dataset,
            "tokenizer": self._tokenizer,
            "reward_tokenizers": self.reward_processing_classes,
            "reward_weights": getattr(self.args, "reward_weights", None),
            "tools": self._tools,
            "environment_factory": self._environments,
            "run_dir": settings.pop("output_dir", None),
            "resume": resume,
            "settings": settings,
            "trl_defaults": defaults,
            "algorithm": self.algorithm,
        }
        return api.Call(**{**arguments, **changes})

    # What a user calls.

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> Any:
        """Train, and return TRL's ``TrainOutput``: ``global_step``, ``training_loss`` and ``metrics``.

        ``resume_from_checkpoint``: True = continue in ``output_dir``. A path = continue from that ``global_step_N`` folder, or
        from the newest checkpoint in that run folder. None = use the argument of the same name in ``args``.

        Raises:
            UserError: As :func:`verl_memopt.train`.
        """
        from transformers.trainer_utils import TrainOutput

        call = self._call() if resume_from_checkpoint is None else self._call(resume=resume_from_checkpoint)
        self._callbacks.begin()
        self.run = api.train_call(call, self._callbacks.listen)
        self._reference = None  # training may have moved the reference
        if self._loaded is not None:
            take_trained(self._loaded, self.run.model_path, self._trusted)
        metrics = last_metrics(self.state.log_history)
        return TrainOutput(self.state.global_step, metrics.get("train_loss", 0.0), metrics)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Validate the current model on held-out rows, and return the metrics.

        The validation is a separate run with its own engine. Its folder is in ``evaluations/`` of the last run's folder, or of
        ``output_dir`` before the first run.

        Args:
            eval_dataset: Rows, or a dict of name -> rows. None = the ``eval_dataset`` of the trainer.
            ignore_keys: Not used.
            metric_key_prefix: Prefix of each metric's name.

        Raises:
            UserError: There are no rows, or :func:`verl_memopt.train` would raise it.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None:
            raise ArgumentError("evaluate: there are no held-out rows. Give eval_dataset here or to the trainer.")
        began, log = time.monotonic(), {}

        def take(metrics: dict[str, float]) -> None:
            log.update(metrics)

        call = self._call(eval_dataset=rows)
        if self.run is not None:
            call = self._call(eval_dataset=rows, **self._trained())
        place = self.run.path if self.run is not None else Path(call.run_dir or "runs").expanduser().absolute()
        api.evaluate_call(call, place / "evaluations", self._callbacks.evaluation(metric_key_prefix, take))
        seconds = time.monotonic() - began
        return {**log, f"{metric_key_prefix}_runtime": seconds, "epoch": self.state.epoch}

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the files of the trained model to a folder. None = from ``model/`` in the run's folder into the run's folder.

        Adapters lie beside the model they are merged into, in peft's format, as TRL saves them.

        Raises:
            ConfigError: Nothing was trained yet, or a copy would overwrite a file that no run has written.
        """
        run = self._done("save_model")
        given = run.path if output_dir is None else usable_path(output_dir, "save_model: output_dir", ArgumentError)
        target = given.expanduser().absolute()
        names, ours, adapter = model_files(run.model_path), model_files(target), run.model_path / "adapter"
        adapters = {path.name for path in adapter.iterdir()} if adapter.is_dir() else set()
        written = {*(names - ours), *(set() if ours else adapters)}
        if others := sorted(name for name in written if os.path.lexists(target / name)):
            raise ArgumentError(f"save_model: {target / others[0]} is there, and no run wrote it. Give another folder.")
        copy = _link if target == run.path else shutil.copy2  # hard links keep the run's folder from growing
        for source in (run.model_path, adapter) if adapters else (run.model_path,):
            shutil.copytree(source, target, dirs_exist_ok=True, copy_function=copy)

    def push_to_hub(self, commit_message: str = "End of training", **details: Any) -> str:
        """Upload the trained model to the hub, and return its address. ``details`` (for a model card) are ignored.

        Raises:
            ConfigError: Nothing was trained yet, or the hub refuses the model.
        """
        from huggingface_hub import HfApi

        run, args = self._done("push_to_hub"), self.args
        name = getattr(args, "hub_model_id", None) or run.path.name
        try:
            hub = HfApi(token=getattr(args, "hub_token", None))
            place = hub.create_repo(name, private=getattr(args, "hub_private_repo", None), exist_ok=True)
            hub.upload_folder(repo_id=place.repo_id, folder_path=run.model_path, commit_message=commit_message)
        except Exception as problem:  # the hub's client raises many classes of errors
            raise ArgumentError(
                f"push_to_hub: the hub did not accept the model ({type(problem).__name__}: {problem!s:.300}). It needs the "
                f"network and a token that may write (hf auth login). The model is in {run.model_path}."
            ) from problem
        return str(place)

    def end(self) -> None:
        """Do nothing, because a run ends its loggers by itself. TRL's scripts call this at their end."""

    def add_callback(self, callback: Any) -> None:
        """Add a callback of transformers: an object or a class."""
        self._callbacks.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by its object or its class."""
        self._callbacks.remove(callback)

    def is_world_process_zero(self) -> bool:
        """Return True: the script runs in one process, whatever the number of devices."""
        return True

    # Attributes of TRL's trainers.

    @property
    def state(self) -> TrainerState:
        """Transformers' ``TrainerState``. Its ``log_history`` has TRL's metric names."""
        return self._callbacks.state

    @property
    def processing_class(self) -> Any:
        """The tokenizer, loaded on first use."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            name = self._given if isinstance(self._given, str | Path) else self._given.config._name_or_path
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        return self._tokenizer

    @property
    def model(self) -> Any:
        """The model as an object of transformers or peft: the starting model, or after training the trained model.

        It is loaded on first use, into host memory. The workers train a separate copy.
        """
        if self._loaded is None:
            self._loaded = loaded(self._given, getattr(self.args, "model_init_kwargs", None), self._trusted)
            if self.run is not None and self._peft is None:
                take_trained(self._loaded, self.run.model_path, self._trusted)
        if self._peft is not None and not is_adapted(self._loaded):
            self._loaded = with_adapters(self._loaded, self._peft)
            if self.run is not None:
                take_trained(self._loaded, self.run.model_path, self._trusted)
        return self._loaded

    @property
    def ref_model(self) -> Any:
        """The reference model of the KL as an object of transformers. It is loaded on first use.

        If training moves the reference, it has the moved weights. None = there is no KL, or the model has adapters: the
        reference is then the same model without adapters or with other adapters.
        """
        settings, defaults = self._settings()
        values = {**defaults, **settings}
        if not any(values.get(name) for name in ("beta", KL_IN_LOSS, KL_IN_REWARD)):
            return None
        if (
            self._peft is not None
            or is_adapted(self._given)
            or any(name.endswith("lora_rank") and values[name] for name in values)
        ):
            return None
        if self._reference is None:
            given = values.get(REFERENCE_PATH) or self._given
            start = given if self.run is None else starting_model(self.run.path)
            self._reference = reference(start, getattr(self.args, "model_init_kwargs", None), self._trusted)
            if self.run is not None:
                take_moved(self._reference, self.run.path)
        return self._reference

    @property
    def _trusted(self) -> bool:
        return bool(getattr(self.args, "trust_remote_code", False))

    def _trained(self) -> dict[str, Any]:
        """Return arguments for a call that starts from the trained model, whose adapters are merged."""
        settings, _ = self._settings()
        lora = ("lora", "target_modules", "target_parameters", "exclude_modules")
        kept = {name: value for name, value in settings.items() if not name.rpartition(".")[2].startswith(lora)}
        for name in ("output_dir", "reward_weights", "model_init_kwargs"):
            kept.pop(name, None)
        return {"model": str(self._done("evaluate").model_path), "settings": kept}

    def _done(self, name: str) -> api.Run:
        if self.run is None:
            raise ArgumentError(f"{name}: nothing was trained yet. Call train() first.")
        return self.run


def _link(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
