"""Agent loops in verl's form, with one way to go wrong for each check, for a model with random weights."""

import asyncio
import time
from uuid import uuid4

from verl_memopt.agents.agent_loops import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register, simple_timer


class Loop(AgentLoopBase):
    """Asks three times, with the text of a tool in between."""

    def __init__(self, *args, turns=3, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns, self.response_length = turns, self.config.actor_rollout_ref.rollout.response_length

    async def ask(self, ids, sampling_params, **changes):
        return await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 6, **changes}
        )

    async def run(self, sampling_params, **kwargs):
        metrics, mask, log_probs = {}, [], []
        prompt = ids = await self.apply_chat_template(kwargs["raw_prompt"])
        for _ in range(self.turns):
            with simple_timer("generate_sequences", metrics):
                output = await self.ask(ids, sampling_params)
            tool = self.tokenizer.encode(f" {len(ids)}", add_special_tokens=False)
            ids = ids + output.token_ids + tool
            mask += [1] * len(output.token_ids) + [0] * len(tool)
            log_probs += [*(output.log_probs or []), *[0.0] * len(tool)]
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids[len(prompt) :], response_mask=mask, response_logprobs=log_probs,
            reward_score=float(kwargs["number"]), num_turns=7, metrics=AgentLoopMetrics(**metrics), extra_fields={"kept": "yes"},
        )  # fmt: skip


@register("cut")
class Cut(Loop):
    """Cuts the end of what was sampled, as at a length limit, and asks for two answers at the same time."""

    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        first, other = await asyncio.gather(
            self.ask(prompt, sampling_params, ignore_eos=True), self.ask(prompt, sampling_params, temperature=0.0)
        )
        second = await self.ask(prompt + first.token_ids, sampling_params, ignore_eos=True)
        response = first.token_ids + (second.token_ids[:-1] or second.token_ids)
        return AgentLoopOutput(prompt, response, [1] * len(response), extra_fields={"other": other.token_ids})


class Broken(Loop):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.speed = self.config.trainer.speed


class Wrong(Loop):
    """Goes wrong as the row says."""

    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        changes = {"temperature": 0.5} if kwargs["wrong"] == "temperature" else {}
        output = await self.ask(prompt, sampling_params, **changes)
        response, mask = list(output.token_ids), [1] * len(output.token_ids)
        match kwargs["wrong"]:
            case "raises":
                raise LookupError("no such game")
            case "hangs":
                await asyncio.sleep(100)
            case "blocks":
                time.sleep(100)
            case "floods":
                while True:
                    await asyncio.gather(*(self.ask(prompt, sampling_params, max_tokens=1) for _ in range(64)))
            case "mask":
                mask += [0]
            case "invents":
                response[0] = (response[0] + 1) % 50
            case "moves":
                prompt = prompt[1:]
            case "long":
                response, mask = response + [5] * 1000, mask + [0] * 1000
            case "nothing":
                return None
            case "foreign":
                await self.ask([10**6], sampling_params)
            case "empty":
                await self.ask([], sampling_params)
            case "parameter":
                await self.ask(prompt, sampling_params, top_p=7)
            case "name":
                await self.ask(prompt, sampling_params, beams=7)
            case "room":
                await self.ask(prompt * 100, sampling_params)
        return AgentLoopOutput(prompt, response, mask)
