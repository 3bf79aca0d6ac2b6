"""The frozen student of RLT: what its folder must contain, its role in a worker, and its scoring pass without gradients.

Memory: a pass over whole sequences keeps the logits of every token: B x T x V x 4 bytes, for B rows of T tokens and a vocabulary
of V. Here micro-batches have a bounded number of tokens, logits are computed only for tokens of explanations and solutions, and
only ``logits_chunk_tokens`` of these tokens have logits at the same time. So the peak does not grow with the number of rows. A
longer row adds only the hidden states of its own micro-batch.

Explanations of one question share the student's prompt, which is computed once per micro-batch. The tokens after the solution are
never computed, because in a causal model they change nothing before them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_memopt.config.schema import Model, ScoringModel
from verl_memopt.data.batch import Ragged, RolloutBatch, scatter_tokens, token_index
from verl_memopt.data.encoder import TOKENIZER_PARTS, tokenizer_digests
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora_torch import adapters_off
from verl_memopt.memory.residency import REFERENCE, REWARD_MODEL, OffloadedParams
from verl_memopt.memory.token_packing import RowTokens, pack_groups_under
from verl_memopt.model.folder import check_vocabulary, resolve_folder
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.model.packing import Pack
from verl_memopt.model.packing_check import REWARD_KEY, check_architecture, frozen_causal_model
from verl_memopt.model.prefix_kv import PrefixKV
from verl_memopt.model.weights import fill_from_folder, load_model_config, mapped_weights
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student_rows import BRIDGE, END, PREFIX, SOLUTION, THINK, StudentRows
from verl_memopt.worker.policy import forward_pass, pack_log_probs
from verl_memopt.worker.roles import FrozenModel, RoleBuilder, arriving_units, exact_weights_of

_WITHOUT_EFFECT = frozenset(
    (
        *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type", "initializer_range"),
        *("max_position_embeddings", "attention_dropout"),
    )
)
"""Entries of a model's config that change nothing in its forward at a given position."""


def find_student(student: ScoringModel, policy: Model, policy_tokenizer: Any, longest: int, sampled_ids: int = 0) -> Path:
    """Return the folder of the student's model.

    Args:
        student: Settings of the student's model.
        policy: Settings of the policy's model.
        policy_tokenizer: The policy's tokenizer. The student gets its token ids.
        longest: Upper limit of the tokens in a student sequence.
        sampled_ids: The student gets ids that the policy sampled, which are below this number. 0 = only ids of the tokenizer.

    Raises:
        ConfigError: There is no such folder, its model is no causal LM that can run here, or its embedding has fewer rows than
            the tokenizer has tokens or than the policy's embedding has.
    """
    folder = resolve_folder(str(student.path), f"{REWARD_KEY}.path", student.trust_remote_code)
    checked = check_architecture(frozen_causal_model(student, policy), folder, longest, REWARD_KEY)
    check_vocabulary(policy_tokenizer, checked.embedding_rows, f"{REWARD_KEY}.path={folder}")
    if checked.embedding_rows < sampled_ids:
        raise ConfigError(
            f"{REWARD_KEY}.path={folder}: its embedding has {checked.embedding_rows} rows, and that of "
            f"actor_rollout_ref.model.path={policy.path} has {sampled_ids}, so the policy may sample tokens that the student "
            "does not have. Set reward_model.rlt.align=retokenize, so that the student reads none of them, or choose a student "
            f"with at least {sampled_ids} rows."
        )
    return folder


def check_same_shape(student: ScoringModel, folder: Path, policy: Model, reference: Path) -> None:
    """Check that the reference's module can hold the student's weights and then computes the same as the student.

    Raises:
        ConfigError: The configs of the models differ. The message names each entry that differs.
    """
    student_config = load_model_config(frozen_causal_model(student, policy), folder, REWARD_KEY).to_dict()
    reference_config = load_model_config(policy, reference).to_dict()
    names = sorted((student_config.keys() | reference_config.keys()) - _WITHOUT_EFFECT)
    different = [
        f"{name} ({student_config.get(name)} and {reference_config.get(name)})"
        for name in names
        if student_config.get(name) != reference_config.get(name)
    ]
    if different:
        raise ConfigError(
            f"reward_model.residency=swap: the student {folder} cannot take the device memory of the reference {reference}: "
            f"they differ in {', '.join(different)}. Set reward_model.residency=separate, or choose a student of the "
            "reference's shape."
        )


def check_same_tokenizer(teacher: Any, student: Any, student_path: str) -> None:
    """Check that both tokenizers give every text the same ids.

    Raises:
        ConfigError: A part of the tokenizers differs. The message names each such part.
    """
    teacher_digests, student_digests = tokenizer_digests(teacher), tokenizer_digests(student)
    different = [part for part in TOKENIZER_PARTS if teacher_digests[part] != student_digests[part]]
    if different:
        raise ConfigError(
            f"the student {student_path}: its tokenizer differs from the policy's in {', '.join(different)}. The reward compares "
            "both models token by token. Choose a student of the policy's family, or leave it out to use the reference."
        )


@dataclass(frozen=True)
class StudentLogProbs:
    """The student's log-probs on the host: ``think`` fp32 [tokens of all explanations], ``solution`` fp32 [of all solutions]."""

    think: Tensor
    solution: Tensor


def student_batch(rows: StudentRows, share_prefixes: bool = True) -> RolloutBatch:
    """Turn rows into prompts and responses. A response is explanation, bridge and solution.

    ``share_prefixes``: rows with the same prompt compute it only once.
    """
    part = rows.part_of_token()
    is_response = (part != PREFIX) & (part != END)
    prompts = rows.part(PREFIX)
    numbers: dict[bytes, int] = {}
    groups = [numbers.setdefault(prompt.numpy().tobytes(), len(numbers)) for prompt in prompts.rows()]
    return RolloutBatch(
        prompts=prompts,
        responses=Ragged(flat=rows.ids.flat[is_response], lengths=rows.parts[:, [THINK, BRIDGE, SOLUTION]].sum(1), batch_size=[]),
        group=torch.tensor(groups, dtype=torch.int64),
        prompt_group=torch.tensor(groups if share_prefixes else range(len(groups)), dtype=torch.int64),
        batch_size=[],
    )


def teacher_batch(prompts: Ragged, rows: StudentRows) -> RolloutBatch:
    """Return the explanations as responses to the teacher's prompts, for a log-prob pass of the teacher.

    ``prompts``: int64, the teacher's prompt of each row, which ends where the explanation in ``rows`` begins.
    """
    number = torch.arange(rows.num_rows)
    return RolloutBatch(prompts=prompts, responses=rows.part(THINK), group=number, prompt_group=number, batch_size=[])


def student_micro_batches(tokens: RowTokens, max_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most ``max_tokens`` computed tokens. A longer row gets a micro-batch of its own.

    ``tokens``: tokens of the rows, as ``student_batch(rows).row_tokens()`` returns them.
    """
    lengths = tokens.row_lengths()
    long = [[row] for row, length in enumerate(lengths) if length > max_tokens]
    others = [row for row, length in enumerate(lengths) if length <= max_tokens]
    if not others and long:
        return long
    bins = pack_groups_under(tokens.select(others), max_tokens, [f"row {row}" for row in others])
    return [[others[place] for place in places] for places in bins] + long


def compute_student_log_probs(
    student: PolicyModel,
    rows: StudentRows,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    device: torch.device,
    share_prefixes: bool = True,
) -> StudentLogProbs:
    """Compute the student's log-probs of explanations and solutions.

    ``micro_batches``: rows of each forward. Together they hold every row once, and all ranks have the same number of them.
    """
    batch = student_batch(rows, share_prefixes)
    part = rows.part_of_token()
    part = part[(part != PREFIX) & (part != END)]
    is_read, sizes = part != BRIDGE, batch.responses.sizes()

    def forward(pack: Pack, prefix_kv: PrefixKV | None, chosen: Sequence[int] | Tensor) -> Tensor:
        assert not isinstance(chosen, Tensor), "a student's rows are never computed in parts"
        places = is_read[token_index(sizes, chosen)].nonzero()[:, 0]
        return pack_log_probs(student, pack.with_targets(places), temperature, False, prefix_kv)[0]

    outputs = forward_pass(student, batch, micro_batches, device, forward)
    log_probs = scatter_tokens(outputs, rows.parts[:, [THINK, SOLUTION]].sum(1).tolist())
    is_think = part[part != BRIDGE] == THINK
    return StudentLogProbs(think=log_probs[is_think], solution=log_probs[~is_think])


def join_log_probs(parts: Sequence[tuple[Sequence[int], StudentLogProbs]], rows: StudentRows) -> StudentLogProbs:
    """Join the log-probs that the ranks computed for their shares of the rows.

    ``parts``: (rows of the share, log-probs of these rows) per rank. Together they contain every row once.
    """
    return StudentLogProbs(
        think=scatter_tokens([(share, part.think) for share, part in parts], rows.parts[:, THINK].tolist()),
        solution=scatter_tokens([(share, part.solution) for share, part in parts], rows.parts[:, SOLUTION].tolist()),
    )


@dataclass(frozen=True)
class StudentReply:
    log_probs: StudentLogProbs
    seconds: float
    """Time of the forwards. If the student rests on the host, they begin while its weights are still copied to the device."""


@dataclass(frozen=True)
class Student:
    """Scores explanations without gradients.

    Attributes:
        model: The student's own model, the reference, or the policy, whose adapters are then switched off.
        plan: How explanations are scored.
        device: The device of the model.
    """

    model: PolicyModel
    plan: StudentPlan
    device: torch.device

    def log_probs(
        self, rows: StudentRows, micro_batches: Sequence[Sequence[int]], temperature: float, exact: bool = False
    ) -> StudentReply:
        """Return the log-probs of explanations and solutions, with the time that they took.

        ``micro_batches``: rows of each forward; all ranks have the same number of them. ``exact``: use the unquantised weights of
        a quantised student.
        """
        began, options = time.perf_counter(), (rows, micro_batches, temperature, self.device, self.plan.shares_prompts)
        assert self.plan.folder is not None or not exact, "a quantised student is a model of its own"
        weights = exact_weights_of(self.model, Path(str(self.plan.folder)), self.device) if exact else nullcontext()
        with logits_in_chunks(self.model, self.plan.rlt.logits_chunk_tokens), adapters_off(self.model), weights:
            log_probs = compute_student_log_probs(self.model, *options)
        return StudentReply(log_probs, time.perf_counter() - began)


@contextmanager
def logits_in_chunks(model: PolicyModel, tokens: int) -> Iterator[None]:
    # The student may be the policy or the reference, whose own setting is put back.
    before = model.head.chunk_tokens
    model.head.chunk_tokens = tokens
    try:
        yield
    finally:
        model.head.chunk_tokens = before


@dataclass(frozen=True)
class StudentPlan:
    """What a worker builds to score explanations: a :class:`verl_memopt.worker.roles.RolePlan`."""

    model: ScoringModel
    """Settings of the student's own model."""
    rlt: RltReward
    """How explanations are scored."""
    residency: str
    """``alias_ref``, ``separate`` or ``swap``."""
    folder: str | None = None
    """Folder of the student's model. None with ``alias_ref``."""
    shares_prompts: bool = True
    """Explanations of one question compute the student's prompt once."""

    @property
    def is_reference(self) -> bool:
        return self.residency == "alias_ref"

    def build(self, roles: RoleBuilder, policy: PolicyModel, reference: PolicyModel | None) -> Student:
        """Return the student. Without a folder it is the reference, or with LoRA the policy without its adapters.

        ``reference``: None if the reference has no model of its own.
        """
        if self.folder is None:
            model = policy if reference is None else reference
        elif self.residency == "swap":
            assert reference is not None
            model = _swapped(roles, reference, Path(self.folder))
        else:
            settings, actor = roles.plan.settings, roles.plan.settings.actor
            frozen = FrozenModel(
                part=REWARD_MODEL,
                key=REWARD_KEY,
                model_key=REWARD_KEY,
                model=frozen_causal_model(self.model, settings.model),
                fsdp=self.model.fsdp_config,
                compiled=actor.use_torch_compile,
                quantization=self.model.quantization,
            )
            model = roles.frozen(frozen, Path(self.folder))
        return Student(model, self, roles.device)


def _swapped(roles: RoleBuilder, reference: PolicyModel, folder: Path) -> PolicyModel:
    """Return the reference's module. It holds the student's weights in the phase ``reward``, and its own in the phase ``ref``.

    While they are not in use, both sets of weights are in host memory. On the device they use the same storages in turn.
    """
    residency = roles.residency
    reference_params = residency.find(REFERENCE)
    assert isinstance(reference_params, OffloadedParams)
    with residency.phase("ref"):  # in this phase the storages have their full size
        reference_params.arrive()
        is_mapped = roles.plan.settings.model.load_mode == "mmap"
        mapped = mapped_weights(reference, folder) if is_mapped else None
        units = arriving_units(reference, roles.plan.settings.ref.fsdp_config)
        home = OffloadedParams(REWARD_MODEL, reference.parameters(), roles.device, mapped, *units)
        if mapped is None:
            fill_from_folder(reference, folder, REWARD_KEY)
        home.to_host()
    residency.add(home)
    residency.take_turns(home, reference_params)
    return reference
