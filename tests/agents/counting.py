"""A taskset of verifiers: three turns in process. The reward is the number of distinct characters of the replies."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class CountingHarnessConfig(vf.HarnessConfig):
    pass


class CountingHarness(vf.Harness[CountingHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60) as client:
            for turn in range(3):
                reply = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages, "max_tokens": 8},
                )
                if reply.status_code != 200:
                    return ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                messages.append(reply.json()["choices"][0]["message"])
                messages[-1]["content"] = messages[-1]["content"] or ""
                messages.append({"role": "user", "content": f"next {turn}"})
        return ProgramResult(exit_code=0, stdout="", stderr="")


class CountingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def distinct(self, trace) -> float:
        said = [node.message.content or "" for node in trace.nodes if node.message.role == "assistant"]
        return float(len(set("".join(said))))


class CountingConfig(vf.TasksetConfig):
    pass


class CountingTaskset(vf.Taskset[CountingTask, CountingConfig]):
    def load(self):
        for number in range(8):
            yield CountingTask(vf.TaskData(prompt=f"count {number}"), self.config.task)


__all__ = ["CountingTaskset", "CountingHarness"]
