"""Environments of the package verifiers (0.4, ``verifiers.v1``) as agent loops.

An entry of ``agent_loop_config_path`` names one::

    - name: wordle
      _target_: verl_memopt.agents.verifiers_loop.VerifiersLoop
      env: {taskset: {id: textarena, game: Wordle-v0}}

``env`` has the settings of a verifiers environment. Its rewards are those of the conversations. The column ``task_index`` of a
row is the number of its task in the taskset. verifiers renders the prompts with the ``renderer`` of the entry (a mapping with
its ``name``), and reaches the run's engine by HTTP within the process, so that the update learns the engine's own tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from verl_memopt.agents.agent_loops import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl_memopt.agents.calls import FailedError

SESSION_HEADER = "X-Session-ID"
"""The id of the trace, which verifiers sends with each request."""
PASSED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop", "stop_token_ids", "ignore_eos")
"""Sampling parameters that verifiers may change."""


class Served:
    """A verifiers environment of this process, and the endpoint through which its agents reach the engine."""

    def __init__(self, settings: Mapping[str, Any], renderer: Mapping[str, Any] | None, tokenizer: Any) -> None:
        vf = _verifiers()
        from verifiers.v1.utils.loaders import environment_class, load_environment

        taskset = settings.get("taskset") or {}
        made = environment_class(taskset.get("id", ""), settings.get("id", ""))
        self.env = load_environment(_config_class(made).model_validate(dict(settings)))
        self._vf, self._renderer, self._tokenizer = vf, renderer, tokenizer
        self._tasks: list[Any] = []
        self._left = iter(self.env.taskset)
        self._started = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self.loops: dict[str, VerifiersLoop] = {}
        """Id of a trace -> the loop of its conversation."""

    def task(self, index: int) -> Any:
        self._tasks += itertools.islice(self._left, max(index + 1 - len(self._tasks), 0))
        if not 0 <= index < len(self._tasks):
            raise FailedError(f"task_index={index}: the taskset has {len(self._tasks)} tasks")
        return self._tasks[index]

    async def context(self, sampling: Mapping[str, Any]) -> Any:
        async with self._started:
            if self._stack is None:
                await self._start()
        client = self._vf.TrainClientConfig(
            base_url=self._url, api_key_var="VERL_MEMOPT_NO_KEY", renderer=self._renderer, renderer_model_name=self._folder
        )
        passed = {name: value for name, value in sampling.items() if name in PASSED}
        return self._vf.ModelContext(model=self._folder, client=client, sampling=_sampling(passed))

    async def _start(self) -> None:
        from aiohttp import web

        # Its own text files: verifiers loads tokenizers by folder, and this one may have another chat template than the model's.
        self._folder = tempfile.mkdtemp(prefix="tokenizer_")
        self._tokenizer.save_pretrained(self._folder)
        stack = AsyncExitStack()
        token = secrets.token_urlsafe(32)
        app = web.Application(client_max_size=2**28)
        app.router.add_post(f"/{token}/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}/{token}/v1"
        await stack.enter_async_context(self.env.serving())
        self._stack = stack

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        loop = self.loops.get(request.headers.get(SESSION_HEADER, ""))
        if loop is None:
            return web.json_response({"error": {"message": "this conversation has ended"}}, status=400)
        sampling = {name: value for name, value in body["sampling_params"].items() if name in PASSED}
        try:
            output = await loop.server_manager.generate(prompt_ids=body["token_ids"], sampling_params=sampling)
        except ValueError as problem:
            return web.json_response({"error": {"message": str(problem)}}, status=400)
        log_probs = output.log_probs or [0.0] * len(output.token_ids)
        entries: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(output.token_ids, log_probs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "logprobs": {"content": entries},
        }
        return web.json_response({"request_id": secrets.token_hex(8), "choices": [choice]})


_served: dict[str, Served] = {}


def _verifiers() -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as problem:
        raise FailedError(f"verifiers.v1 cannot be imported ({problem}); install verifiers==0.4.0") from problem
    return vf


def _config_class(made: Any) -> Any:
    from verifiers.v1.utils.generic import concrete_type

    vf = _verifiers()
    return concrete_type(made, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig


def _sampling(values: Mapping[str, Any]) -> Any:
    from verifiers.v1.types import SamplingConfig

    return SamplingConfig(**values)


class VerifiersLoop(AgentLoopBase):
    """One episode of a verifiers environment with one trained agent."""

    gives_reward = True

    def __init__(
        self, *args: Any, env: Mapping[str, Any] | None = None, renderer: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if not env:
            raise FailedError("env is missing; give the settings of the environment, such as {taskset: {id: ...}}")
        key = json.dumps([env, renderer], sort_keys=True)
        if key not in _served:
            _served[key] = Served(env, renderer, self.tokenizer)
        self._served = _served[key]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        index = kwargs.get("task_index")
        if not isinstance(index, int):
            raise FailedError("the row has no column task_index with the number of its task in the taskset")
        task, context = self._served.task(index), await self._served.context(sampling_params)
        traces: list[str] = []

        def begun(trace: Any) -> None:
            traces.append(trace.id)
            self._served.loops[trace.id] = self

        try:
            episode = await self._served.env.run_episode(task, context, on_trace=begun)
        finally:
            for name in traces:
                del self._served.loops[name]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            said = f"{errors[0].type}: {errors[0].message}" if errors else "it is not ok, and says no error"
            raise FailedError(f"the episode failed: {said}")
        trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        if len(trained) != 1:
            raise FailedError(f"the episode has {len(trained)} trained agents; one is possible")
        return _outputs(trained[0])


def _outputs(trace: Any) -> list[AgentLoopOutput]:
    outputs = []
    for branch in trace.branches:
        ids, mask = list(branch.token_ids), [int(sampled) for sampled in branch.sampled_mask]
        if branch.trainable and any(mask):
            first = mask.index(1)
            rewards = {name: reward and reward.value for name, reward in trace.rewards.items()}
            outputs.append(
                AgentLoopOutput(
                    ids[:first], ids[first:], mask[first:], metrics=AgentLoopMetrics(), reward_score=float(trace.reward),
                    num_turns=len(branch.nodes), extra_fields={"rewards": rewards, "metrics": dict(trace.metrics)},
                )
            )  # fmt: skip
    if not outputs:
        raise FailedError("the episode has no sampled tokens")
    return outputs
