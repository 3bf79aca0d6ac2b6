"""Training from Python: :func:`train`, and :class:`Run` for the results in a run's folder.

A call becomes a command line: datasets and reward functions are written into files of the run's folder, and every setting
becomes an override. So Python and the shell start the same run. ``Run.command`` is the command line.
"""

from __future__ import annotations

import base64
import io
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_memopt.config.aliases import MINI_BATCH, PROMPTS
from verl_memopt.config.spelling import ESTIMATOR
from verl_memopt.config.trl_names import BATCH_NAMES
from verl_memopt.config.values_of_python import as_override
from verl_memopt.errors import ConfigError
from verl_memopt.observe.own_files import private_files
from verl_memopt.observe.run_folder import COMMAND, FINAL_MODEL, INPUTS
from verl_memopt.observe.secrets import without_secrets_of
from verl_memopt.records import usable_path
from verl_memopt.trainer.listener import at_steps

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings
    from verl_memopt.run.inputs import Inputs
    from verl_memopt.trainer.listener import Listener

CONFIGS = {name: f"{name}_trainer" for name in ("ppo", "grpo", "rloo", "sft", "distill")}
"""``algorithm`` -> the packaged config. Any other name is an advantage estimator, which is set in PPO's config."""

BATCH = 32
"""Prompts per step if the call gives no batch size. A dataset with fewer rows uses all of them in each step."""
LAST_ALONE = 1_000_000
"""``trainer.save_freq`` if the call gives none. It is larger than the number of steps of any run, so that only the last step is
saved."""
VALIDATE_EVERY = 10
"""Steps between validations if the call has evaluation rows and gives no ``trainer.test_freq``."""

FOLDER, RESUME = "trainer.default_local_dir", "resume_from_checkpoint"
ARGUMENTS = {
    "actor_rollout_ref.model.path": "model",
    "teacher.model.path": "teacher",
    "data.train_files": "dataset",
    "data.val_files": "eval_dataset",
    "trainer.total_training_steps": "steps",
    FOLDER: "run_dir",
    "custom_reward_function.path": "rewards",
}
"""Key -> the argument of :func:`train` that sets it. A call that also sets the key by ``**settings`` is refused."""


def train(
    model: Any,
    dataset: Any = None,
    rewards: Any = None,
    *,
    algorithm: str | None = None,
    teacher: Any = None,
    eval_dataset: Any = None,
    reward_weights: Sequence[float] | None = None,
    memory: str | float | None = None,
    steps: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool | str | Path = False,
    tokenizer: Any = None,
    on_step: Listener | None = None,
    tools: Any = None,
    environment_factory: Any = None,
    **settings: Any,
) -> Run:
    """Train a model and return the run.

    Args:
        model: Folder or hub id of a model, or a model object of transformers or peft.
        dataset: Training rows: a list of dicts, a ``datasets.Dataset``, a DataFrame, one or more files, or a hub id
            (``openai/gsm8k:main@train``). Each row has a ``prompt``: a string, or a list of ``{role, content}``. The reward
            functions receive the other columns. If the columns have other names, set ``prompt_key=..., answer_key=...``. An
            iterable without a length, or a function that returns one, is streamed unless it is short: its rows are read as steps
            need them (``streaming``). None = ``environment_factory`` makes the tasks itself: its ``reset`` returns the prompt.
            ``steps`` is then required.
        rewards: A reward function, a list of them, or a dict of name -> function. A function has TRL's signature, verl's
            signature, or ``f(answer, row)`` (:mod:`verl_memopt.rewards.python_functions`). ``"file.py:function"`` names a
            function in a file. A reward model (a folder, hub id or object) may be given instead of a function. None = the
            built-in rule of each row's ``data_source``.
        algorithm: ``grpo``, ``rloo``, ``ppo``, ``sft``, ``distill``, or another value of ``algorithm.adv_estimator``. None =
            ``distill`` with a teacher and without rewards, else ``grpo``.
        teacher: A frozen model with the policy's tokenizer, which judges each token of the answers: a folder, hub id, or model
            object of transformers. The policy learns from it beside the rewards, with the weight ``distill.coef`` (1).
        eval_dataset: Held-out rows, in any form of ``dataset``, or a dict of name -> rows. None = no validation.
        reward_weights: One weight per reward function. None = 1 each.
        memory: Memory profile, such as ``24g``, or the memory of the card in GB.
        steps: Number of training steps. None = ``trainer.total_epochs`` passes over the rows.
        run_dir: Folder of the run. None = a new folder in ``runs/``.
        resume: False = start a new run. If ``run_dir`` holds an earlier run, its files move to ``run_dir/previous/``. True =
            continue the run in ``run_dir`` from its last checkpoint. A run folder = continue that run. A ``global_step_N``
            folder = continue from that checkpoint. With a folder and another ``run_dir``, a new run starts from the checkpoint.
            Every run saves a checkpoint at its end, unless ``save_freq=-1``.
        tokenizer: A tokenizer, or its folder. None = the tokenizer in the model's folder.
        on_step: Called after each step with a :class:`verl_memopt.Progress`. It can read ``progress.metrics``, and set
            ``progress.stop`` or ``progress.save``. An example is :class:`verl_memopt.EarlyStopping`.
        tools: Functions that the model may call, with type hints and Google docstrings. Each prompt is then answered by a
            conversation, in which the model reads what its calls return. ``"file.py:function"`` names a function in a file.
        environment_factory: A class with a method ``reset``, whose other public methods are tools; or a dict of name -> class,
            of which the column ``environment`` chooses one for each row. ``get_reward``, if there is one, gives a reward that is
            added to ``rewards``. ``"file.py:Class"`` names a class in a file.
        settings: Any other setting: verl's key (``**{"actor_rollout_ref.actor.optim.lr": 1e-6}``), the last part of a key if
            it is unique (``lora_rank=16``), TRL's name (``learning_rate=1e-6``), or a section as a dict.

    Raises:
        UserError: The user must correct something: a wrong setting, row or reward function, or a device with too little memory.
        KeyboardInterrupt: The run was interrupted, and all its processes have ended. ``resume=True`` continues it.
    """
    return train_call(
        Call(
            model,
            dataset,
            settings,
            algorithm or ("distill" if teacher is not None and rewards is None else "grpo"),
            memory,
            run_dir,
            tokenizer,
            rewards,
            reward_weights,
            eval_dataset,
            steps,
            resume,
            tools=tools,
            environment_factory=environment_factory,
            teacher=teacher,
        ),
        None if on_step is None else at_steps(on_step),
    )


def train_call(call: Call, listener: Listener | None = None) -> Run:
    """Run the training that ``call`` describes; see :func:`train`. ``listener`` is called at every ``Moment`` of the run."""
    from verl_memopt.observe.log_setup import lasting_console, setup_logging
    from verl_memopt.run.run_lock import only_run
    from verl_memopt.trainer import main_ppo

    setup_logging()
    with only_run("train"), lasting_console():
        folder, loaded, inputs = call.load()
        with private_files(loaded.trainer.private_files), inputs.written():
            code = main_ppo.train_or_advise(loaded, listener=listener, rows=inputs.rows)
    if code:
        raise KeyboardInterrupt(f"the run in {folder} was interrupted; resume=True, run_dir={str(folder)!r} continues it")
    from verl_memopt.trainer.replay import record_folder

    return Run(record_folder(loaded, folder))


SIZES = (PROMPTS, MINI_BATCH, *BATCH_NAMES, "data.gen_batch_size")
"""Names of settings that set the prompts per step."""


def evaluate_call(call: Call, folder: Path, listener: Listener | None = None) -> dict[str, float]:
    """Validate the model of ``call`` on its held-out rows, and return the validation metrics.

    The validation is a run of zero steps. Its folder is the next free number in ``folder``.
    """
    from verl_memopt.data.python_rows import with_length

    keys, given = call._keys_set(call._given()), call._given()
    kept = {name: value for name, value in given.items() if name not in (*SIZES, RESUME) and not keys[name] & {*SIZES, FOLDER}}
    defaults = {name: value for name, value in call.trl_defaults.items() if name not in SIZES}
    settings = {**kept, "trainer.val_only": True, PROMPTS: _fewest_prompts(given)}
    path = next(path for number in itertools.count(1) if not (path := folder / str(number)).exists())
    held_out = call.eval_dataset
    if isinstance(held_out, Mapping):
        held_out = {name: with_length(rows, f"eval_dataset[{name!r}]") for name, rows in held_out.items()}
    else:
        held_out = with_length(held_out, "eval_dataset")
    # A run needs training rows, although this one never reads them.
    rows = next(iter(held_out.values())) if isinstance(held_out, Mapping) else held_out
    run = train_call(
        replace(
            call, dataset=rows, eval_dataset=held_out, settings=settings, trl_defaults=defaults, run_dir=path, steps=None,
            resume=False,
        ),
        listener,
    )  # fmt: skip
    return _validation_of(run)


def _validation_of(run: Run) -> dict[str, float]:
    return {name: value for name, value in run.metrics[0].items() if name.startswith("val")}


def _fewest_prompts(given: Mapping[str, Any]) -> int:
    values = {name.rpartition(".")[2]: value for name, value in given.items()}
    return int(values.get("nnodes", 1)) * int(values.get("n_gpus_per_node", 1))  # one prompt per device


class Run:
    """The results of a run: metrics, charts and the trained model, read from the run's folder.

    Args:
        path: The run's folder.

    Raises:
        UserError: No run has written the folder.
    """

    def __init__(self, path: str | Path) -> None:
        from verl_memopt.observe.run_folder import open_run_folder

        self.path = usable_path(path, "Run(path)")
        self._folder = open_run_folder(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, in order. ``pandas.DataFrame(run.metrics)`` turns them into a table."""
        return self._folder.read_metrics()

    @property
    def summary(self) -> dict[str, Any]:
        """First and last score, duration, peak memory of each phase, and warnings."""
        return self._folder.read_summary()

    @property
    def charts(self) -> list[Path]:
        """The chart files: reward and validation, peak memory of each phase, memory over time."""
        return sorted(self.path.glob("*.png"))

    @property
    def command(self) -> str:
        """The command line that starts the same run in a shell. Checksums replace secrets, as in ``config.yaml``."""
        file = self.path / INPUTS / COMMAND
        return file.read_text() if file.is_file() else ""

    @property
    def model_path(self) -> Path:
        """The folder of the trained model, in the form that transformers and vLLM load.

        Raises:
            ConfigError: The run has saved no model.
        """
        folder = self.path / FINAL_MODEL
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder}: no model was saved. Set trainer.save_final_model=true, or run verl-memopt export.")
        return folder

    def generate(self, prompts: Any, max_tokens: int = 256, temperature: float = 0.0, device: str = "auto") -> str | list[str]:
        """Return the trained model's answer to one prompt, or a list of answers to a list of prompts.

        Args:
            prompts: A string, a conversation (a list of ``{role, content}``), or a list of strings or of conversations.
            max_tokens: Longest answer in tokens.
            temperature: 0 = greedy decoding: always the most likely token.
            device: auto, cuda or cpu.
        """
        from verl_memopt.run.chat import ChatOptions, open_chat, prompts_of

        is_single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], Mapping))
        options = ChatOptions(temperature, max_tokens, system=None)
        chat = open_chat(self.model_path, device, False, options, prompts_of(self.path)[1])
        chat.out = io.StringIO()
        conversations = [prompts] if is_single else prompts
        answers = [chat.answer(prompt) if isinstance(prompt, str) else chat.turn(prompt) for prompt in conversations]
        return answers[0] if is_single else answers

    def evaluate(self, rows: Any) -> dict[str, float]:
        """Answer held-out rows with the trained model, score the answers as the run does, and return the validation metrics.

        The evaluation is a run of zero steps with this run's final settings. Its folder is in ``evaluations/`` of this run.

        Args:
            rows: In any form of ``eval_dataset`` of :func:`train`.

        Raises:
            UserError: A row is wrong, or the run has saved no model.
        """
        from verl_memopt.observe.log_setup import setup_logging
        from verl_memopt.run.run_lock import only_run

        setup_logging()
        with private_files(True), only_run("evaluate"):
            return self._evaluate(rows)

    def _evaluate(self, rows: Any) -> dict[str, float]:
        import yaml

        from verl_memopt.config.keys import flatten, replaced
        from verl_memopt.config.loader import settings_from_mapping
        from verl_memopt.data.python_rows import held_out_files
        from verl_memopt.observe.log_setup import silent
        from verl_memopt.trainer import main_ppo
        from verl_memopt.trainer.replay import record_folder

        start = self.path / "evaluations"
        folder = next(path for number in itertools.count(1) if not (path := start / str(number)).exists())
        files = held_out_files(rows, folder / INPUTS)
        saved = flatten(yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8")))
        with silent():  # the run itself has already warned about settings without effect
            settings = settings_from_mapping(saved)
        loaded = replaced(
            settings,
            {
                "actor_rollout_ref.model.path": str(self.model_path),
                "actor_rollout_ref.model.lora_rank": 0,
                "actor_rollout_ref.model.lora_adapter_path": None,
                "data.val_files": files,
                "trainer.val_only": True,
                "trainer.resume_mode": "disable",
                FOLDER: str(folder),
            },
        )
        main_ppo.train_or_advise(loaded)
        return _validation_of(Run(record_folder(loaded, folder)))

    def __repr__(self) -> str:
        rows = self.metrics
        score = rows[-1].get("critic/score/mean") if rows else None
        return f"Run({str(self.path)!r}, {len(rows)} rows of metrics" + ("" if score is None else f", score {score:.3f}") + ")"

    def _repr_html_(self) -> str:
        images = (base64.b64encode(chart.read_bytes()).decode() for chart in self.charts)
        shown = "".join(f'<img style="max-width:32em" src="data:image/png;base64,{image}">' for image in images)
        return f"<p><code>{self.path}</code></p>{shown}"


# The command line of a call.

NO_ROWS = object()
"""The ``dataset`` of a session that has none: each call of ``generate`` gives the prompts."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of :func:`train` or :func:`verl_memopt.session`."""

    model: Any
    dataset: Any
    settings: Mapping[str, Any]
    algorithm: str = "grpo"
    memory: str | float | None = None
    run_dir: str | Path | None = None
    tokenizer: Any = None
    rewards: Any = None
    reward_weights: Sequence[float] | None = None
    eval_dataset: Any = None
    steps: int | None = None
    resume: bool | str | Path = False
    trl_defaults: Mapping[str, Any] = field(default_factory=dict)
    """TRL's names and TRL's defaults, which apply to settings that the call does not give."""
    reward_tokenizers: Sequence[Any] | None = None
    """Tokenizer of each reward model. None = the tokenizer in the reward model's folder."""
    tools: Any = None
    environment_factory: Any = None
    teacher: Any = None

    def load(self) -> tuple[Path, Settings, Inputs]:
        """Return the run's folder, its settings, and the inputs from Python, which :meth:`Inputs.written` moves into the folder.

        Raises:
            UserError: An argument is wrong. No file is left behind.
        """
        from verl_memopt.data.plugin import forget_files
        from verl_memopt.run.inputs import Inputs

        _check_types(self)
        forget_files()
        given = self._given()
        stated = given.pop(RESUME, None)
        _check_type("resume", stated, RESUME)
        resume = _resumed(stated) or _resumed(self.resume)
        folder = _run_folder(given.pop(FOLDER, None) or self.run_dir, self.model, self.algorithm, resume)
        if resume is True:
            _check_resumable(folder)
        inputs = Inputs(folder)
        try:
            return folder, self._load(given, folder, resume, inputs), inputs
        except BaseException:
            inputs.discard()
            raise

    def _load(self, given: dict[str, Any], folder: Path, resume: bool | Path, inputs: Inputs) -> Settings:
        from verl_memopt.config.keys import flatten, raise_together
        from verl_memopt.config.loader import MODELS, adapter_settings, compose_mapping, load_settings, log_objective
        from verl_memopt.config.teacher_rules import IN_BRACES
        from verl_memopt.config.trl_defaults import defaults_beside, log_defaults
        from verl_memopt.config.values import plain_values
        from verl_memopt.data.messages import NO_PROMPT
        from verl_memopt.data.python_rows import IN_PYTHON, stream_of, write_rows

        trl_values = defaults_beside(self.trl_defaults, given, self.algorithm)
        injected = self._values(inputs.aside)
        injected |= {FOLDER: str(folder), "trainer.resume_mode": "auto" if resume else "disable"}
        if isinstance(resume, Path):
            injected |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(resume)}
        train = inputs.aside / "train.jsonl"
        makes_tasks = self._makes_tasks(given)
        has_rows, rows = self.dataset is not NO_ROWS and not makes_tasks, None
        streams = self._value_of("data.streaming", given)
        dataset, inputs.rows = stream_of(self.dataset, streams) if has_rows else (None, None)
        if inputs.rows is not None:
            injected |= {"data.train_files": IN_PYTHON, "data.streaming": True}
        else:
            rows, injected["data.train_files"] = write_rows(dataset, train, "dataset") if has_rows else (None, str(train))
        injected |= {PROMPTS: BATCH if rows is None else min(BATCH, rows), MINI_BATCH: None}
        taken = set().union(*self._keys_set({**trl_values, **given}).values())
        # The adapter moves into the run's folder only later, so read its settings now, from where it is.
        adapter_values, problems = adapter_settings(
            MODELS[0], {key: value for key, value in injected.items() if key.endswith(".lora_adapter_path")}
        )
        raise_together(problems)
        injected = {key: value for key, value in (adapter_values | injected).items() if key not in taken}
        values = plain_values(inputs.placed(injected) | trl_values | given, self._keys_set({**trl_values, **given}))
        profile = [] if self.memory is None else [f"memory={self.memory}"]
        config = CONFIGS.get(self.algorithm, CONFIGS["ppo"])
        entry = ["sft"] if self.algorithm == "sft" else ["train", "--config-name", config]
        loaded = load_settings(config, profile, quiet=trl_values.keys(), values=values)
        if self.trl_defaults:
            log_defaults(self._keys_set(trl_values), trl_values, loaded, flatten(compose_mapping(config, [])[0]) | injected)
        if makes_tasks and loaded.trainer.total_training_steps is None:
            raise ConfigError("dataset: there are no rows whose number sets the number of steps. Set steps (max_steps).")
        if not has_rows:  # no run starts without rows, so write one step's placeholder rows. A session never uses them.
            told = IN_BRACES.findall(loaded.distill.teacher_prompt or "")
            unused = {**dict.fromkeys(told, "-"), loaded.data.prompt_key: NO_PROMPT if makes_tasks else "-"}
            write_rows([unused] * max(loaded.data.train_batch_size, loaded.data.gen_batch_size or 0), train, "dataset")
        shown = [f"{key}={as_override(without_secrets_of(key, value))}" for key, value in values.items()]
        inputs.command = shlex.join(["verl-memopt", *entry, *shown, *profile]) + "\n"
        log_objective(loaded)
        return loaded

    def _makes_tasks(self, given: Mapping[str, Any]) -> bool:
        """Return whether the environment makes the tasks, and there are no rows."""
        if self.dataset is not None or self.environment_factory is None or self._value_of("data.train_files", given) is not None:
            return False
        if isinstance(self.environment_factory, Mapping):
            raise ConfigError(
                "dataset: several environments need rows with a column `environment` that names one of them. Give such rows, or "
                "one environment."
            )
        return True

    def _value_of(self, key: str, given: Mapping[str, Any]) -> Any:
        # The caller may have used any of the setting's names.
        return next((given[name] for name, keys in self._keys_set(given).items() if keys == {key}), None)

    def _keys_set(self, given: Mapping[str, Any]) -> dict[str, set[str]]:
        from verl_memopt.config.names import keys_set

        estimator = {"ppo": "gae"}.get(self.algorithm, self.algorithm)
        keys = keys_set({ESTIMATOR: estimator, **given})
        return {name: keys[name] for name in given}

    def _given(self) -> dict[str, Any]:
        """Return the settings with sections expanded to dotted keys, and the run folder under its full key.

        Raises:
            ConfigError: A setting and an argument set the same key.
        """
        from verl_memopt.config.aliases import our_key
        from verl_memopt.config.keys import flatten, problem, raise_together, section_keys

        given: dict[str, Any] = {}
        for name, value in self.settings.items():
            is_section = isinstance(value, Mapping) and name in section_keys()
            given |= flatten({name: value}, our_key) if is_section else {name: value}
        twice = []
        for name, keys in self._keys_set(given).items():
            for key in keys & ARGUMENTS.keys():
                argument = ARGUMENTS[key]
                said = getattr(self, argument)
                if said is not None and said is not NO_ROWS and given[name] is not None:
                    what = f"the argument {argument} sets the same key"
                    twice.append(problem({name: given[name]}, what, f"Keep one of {argument} and {name}."))
            if keys == {FOLDER}:
                given[FOLDER] = given.pop(name)
        raise_together(twice)
        return given

    def _values(self, inputs: Path) -> dict[str, Any]:
        from verl_memopt.agents.tools import agent_settings
        from verl_memopt.data.python_rows import held_out_files
        from verl_memopt.model.given import teacher_settings, write_model
        from verl_memopt.rewards.python_functions import reward_settings

        values: dict[str, Any] = {
            **write_model(self.model, self.tokenizer, inputs),
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "data.val_files": None,
            "trainer.save_freq": LAST_ALONE,
        }
        if self.eval_dataset is not None:
            values["data.val_files"] = held_out_files(
                self.eval_dataset, inputs, self._value_of("data.val_max_samples", self.settings)
            )
            values["trainer.test_freq"] = VALIDATE_EVERY
        if self.algorithm not in CONFIGS:
            values["algorithm.adv_estimator"] = self.algorithm
        if self.steps is not None:
            values["trainer.total_training_steps"] = self.steps
        values |= teacher_settings(self.teacher, inputs)
        values |= agent_settings(self.tools, self.environment_factory, inputs)
        return values | self._apart() | reward_settings(self.rewards, self.reward_weights, self.reward_tokenizers, inputs)

    def _apart(self) -> dict[str, Any]:
        """Return the names and weights of the rewards for an algorithm with one advantage per reward, else an empty dict."""
        summed = self.settings.get("multi_objective_aggregation") == "normalize_then_sum"
        if not (summed or "gdpo" in (self.algorithm, self.settings.get(ESTIMATOR))) or self.rewards is None:
            return {}
        from verl_memopt.rewards.python_functions import with_names

        names = list(with_names(self.rewards))
        weights = None if self.reward_weights is None else list(map(float, self.reward_weights))
        keys = names if len(names) > 1 else ["score"]
        return {"algorithm.gdpo_reward_keys": keys, "algorithm.gdpo_reward_weights": weights}


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "algorithm": ((str,), "the name of an algorithm"),
    "memory": ((str, int, float), "a profile such as 24g, or a size in GB"),
    "run_dir": ((str, Path), "a folder"),
    "reward_weights": ((list, tuple), "a list of numbers"),
    "resume": ((bool, str, Path), "True, False, or the folder of a run or checkpoint"),
}
"""Argument -> its allowed types besides None, and a description of a right value."""


def _check_types(call: Call) -> None:
    """Refuse arguments of a wrong type before any file is read."""
    for name in _KINDS:
        _check_type(name, getattr(call, name), name)
    for name in ("model", "tokenizer", "run_dir", "resume", "dataset", "eval_dataset"):
        if isinstance(value := getattr(call, name), str | Path):
            usable_path(value, name, ConfigError)


def _check_type(name: str, value: Any, shown: str) -> None:
    kinds, what = _KINDS[name]
    if name == "reward_weights" and hasattr(value, "tolist"):
        value = value.tolist()
    fits = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if fits and name == "reward_weights":
        fits = all(isinstance(weight, int | float) for weight in value)
    if value is not None and not fits:
        raise ConfigError(f"{shown}={value!r:.100}: expected {what}, and got a {type(value).__name__}. Correct it.")


def _resumed(resume: Any) -> bool | Path:
    """Parse ``resume``. True = continue the run in its own folder. A path = continue that run or checkpoint."""
    word = str(resume).lower()
    if resume is None or word in ("", "false", "true"):
        return word == "true"
    return Path(resume).expanduser().absolute()


def _run_folder(run_dir: str | Path | None, model: Any, algorithm: str, resume: bool | Path) -> Path:
    if run_dir is not None:
        return Path(run_dir).expanduser().absolute()
    if isinstance(resume, Path):
        from verl_memopt.run.checkpoints import STEP_FOLDER

        return resume.parent if STEP_FOLDER.match(resume.name) else resume
    if resume:
        raise ConfigError("resume=True: which run? Give its folder as run_dir.")
    name = Path(model).name if isinstance(model, str | Path) else type(model).__name__
    start = Path("runs").absolute() / f"{name}-{algorithm}"
    return next(path for number in itertools.count(1) if not (path := start.with_name(f"{start.name}-{number}")).exists())


def _check_resumable(folder: Path) -> None:
    """Refuse to resume a run without a checkpoint. A damaged checkpoint is detected later, when it is read."""
    from verl_memopt.run.checkpoints import TRACKER, CheckpointStore

    if CheckpointStore(folder, None).history().commits or (folder / TRACKER).exists():
        return
    what = f"resume=True, run_dir={str(folder)!r}: there is no checkpoint (global_step_N) to continue"
    if (model := folder / FINAL_MODEL).is_dir():
        raise ConfigError(
            f"{what}. To continue from its model, start a new run: model={str(model)!r}, with another run_dir. Only a run that "
            "saves checkpoints can be resumed: leave save_freq out to save one at the end, or set it."
        )
    raise ConfigError(f"{what}. Leave resume (resume_from_checkpoint) out for a new run, or give the folder of the right run.")
