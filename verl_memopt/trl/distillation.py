"""TRL's trainers that learn from a teacher: ``DistillationTrainer``, ``GKDTrainer``, ``GOLDTrainer`` and ``SDFTTrainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from verl_memopt import api
from verl_memopt.config.trl_names import ENGINE, SAMPLES
from verl_memopt.trl.config import DistillationConfig, GKDConfig, GOLDConfig, GRPOConfig, SDFTConfig
from verl_memopt.trl.models import ArgumentError, loaded, reference
from verl_memopt.trl.trainer import TrlTrainer

TEMPERATURE = "actor_rollout_ref.rollout.temperature"


class DistillationTrainer(TrlTrainer):
    """TRL's ``DistillationTrainer``. ``teacher_model`` is the teacher as an object of transformers, loaded on first use."""

    algorithm: ClassVar[str] = "distill"
    config: ClassVar[type[GRPOConfig]] = DistillationConfig
    learns_rewards: ClassVar[bool] = False
    fixed: ClassVar[Mapping[str, tuple[str, Any]]] = {"num_generations": (SAMPLES, 1)}
    """Name of TRL that the config lacks -> our key and what TRL does."""

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        **others: Any,
    ) -> None:
        """Check the arguments. No process starts before :meth:`train`.

        Args:
            model: Folder or hub id of a model, or a model object of transformers or peft.
            teacher_model: Folder or hub id of the teacher, or a model object of transformers, with the tokenizer of ``model``.
                None = ``teacher_model_name_or_path`` of ``args``.
            args: A config of TRL or of this package, or a dict with TRL's names.
            train_dataset: Rows with a ``prompt``.
            eval_dataset: Held-out rows, or a dict of name -> rows.
            processing_class: The tokenizer. None = the tokenizer in the model's folder.
            callbacks: Objects or classes of transformers' ``TrainerCallback``.
            optimizers: Must be None.
            quantization_config: As in :class:`TrlTrainer`.
            peft_config: As in :class:`TrlTrainer`.
            tools: Functions that the model may call, with type hints and Google docstrings.
            others: Other arguments of TRL. They are refused, except that ``REFUSED`` ones may be None. ``reward_funcs`` are read:
                the policy does not learn from them, but they are logged.

        Raises:
            ConfigError: An argument is wrong or has no equal here.
        """
        self._teacher = teacher_model
        super().__init__(
            model, others.pop("reward_funcs", None), args, train_dataset, eval_dataset, processing_class, callbacks=callbacks,
            optimizers=optimizers, peft_config=peft_config, quantization_config=quantization_config, tools=tools, **others,
        )  # fmt: skip

    def _call(self, **changes: Any) -> api.Call:
        call = super()._call(**changes)
        given = {**call.trl_defaults, **call.settings}
        fixed = {key: value for name, (key, value) in self.fixed.items() if given.keys().isdisjoint((name, key))}
        return replace(call, teacher=self._teacher, settings={**fixed, **call.settings})

    @property
    def ref_model(self) -> Any:
        """None: ``beta`` is no KL to a reference here."""
        return None

    @property
    def teacher_model(self) -> Any:
        """The teacher as an object of transformers, loaded on first use. None = the policy is its own teacher."""
        given = self._teacher or getattr(self.args, "teacher_model_name_or_path", None)
        if isinstance(given, str):
            arguments = getattr(self.args, "teacher_model_init_kwargs", None)
            self._teacher = reference(loaded(given, arguments, self._trusted), None, self._trusted)
            return self._teacher
        return given


class GKDTrainer(DistillationTrainer):
    """TRL's ``GKDTrainer``, with ``lmbda=1``: the policy samples all responses. Rows have ``messages`` or a ``prompt``."""

    config: ClassVar[type[GRPOConfig]] = GKDConfig
    fixed: ClassVar[Mapping[str, tuple[str, Any]]] = {**DistillationTrainer.fixed, "use_vllm": (ENGINE, "hf")}
    one_temperature: ClassVar[bool] = False
    """Whether TRL compares the distributions at the temperature of the samples. False = at 1."""

    def __init__(
        self,
        model: Any = None,
        teacher_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: Any = None,
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
        **others: Any,
    ) -> None:
        """As :class:`DistillationTrainer`, with TRL's order of arguments."""
        super().__init__(
            model, teacher_model, args, _with_prompts(train_dataset), _with_prompts(eval_dataset), processing_class, callbacks,
            optimizers, peft_config=peft_config, data_collator=data_collator, compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, formatting_func=formatting_func, **others,
        )  # fmt: skip

    def _settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        settings, defaults = super()._settings()
        values, found = {**defaults, **settings}, []
        if not self.one_temperature and TEMPERATURE not in settings and values.get("temperature") not in (None, 1):
            found.append(
                f"temperature={values['temperature']}: {type(self).__name__} samples at this temperature and compares the models "
                "at 1; here one temperature is for both. Set temperature=1.0, or use DistillationTrainer."
            )
        if values.get("lmbda") not in (None, 1):
            found.append(
                f"lmbda={values['lmbda']}: in other steps {type(self).__name__} learns from the dataset's responses; here the "
                "policy samples all responses. Set lmbda=1.0, or learn the dataset's responses with algorithm=sft and a teacher."
            )
        if found:
            raise ArgumentError("\n".join(found))
        # These trainers shuffle the rows in the sampler, whatever shuffle_dataset says.
        kept = [{name: value for name, value in own.items() if name != "shuffle_dataset"} for own in (settings, defaults)]
        return kept[0], kept[1]


class GOLDTrainer(GKDTrainer):
    """TRL's ``GOLDTrainer`` for a teacher with the policy's tokenizer, with ``lmbda=1``."""

    config: ClassVar[type[GRPOConfig]] = GOLDConfig
    one_temperature: ClassVar[bool] = True


class SDFTTrainer(DistillationTrainer):
    """TRL's ``SDFTTrainer``: the policy learns from a model that reads ``privileged_context`` besides the prompt."""

    config: ClassVar[type[GRPOConfig]] = SDFTConfig

    def __init__(
        self,
        model: Any,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        """As :class:`DistillationTrainer`, with TRL's order of arguments."""
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, peft_config=peft_config,
            **others,
        )  # fmt: skip


def _with_prompts(rows: Any) -> Any:
    # A row with whole conversations gets its prompt: all messages but the last, which is the response of the dataset.
    if isinstance(rows, Mapping):
        return {name: _with_prompts(own) for name, own in rows.items()}
    if isinstance(rows, list):
        return [_with_prompt(row) for row in rows]
    return rows.map(_with_prompt) if hasattr(rows, "map") and hasattr(rows, "features") else rows


def _with_prompt(row: Any) -> Any:
    if not isinstance(row, Mapping) or "prompt" in row or "messages" not in row:
        return row
    return {**row, "prompt": list(row["messages"])[:-1]}
