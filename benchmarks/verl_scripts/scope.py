"""Says which scripts are counted: text, one turn, trained by FSDP, sampled by vLLM or Hugging Face, on any device but an NPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

_AR = "actor_rollout_ref"
_BACKENDS = ("megatron", "veomni", "mlite", "torchtitan", "automodel")
_SHARDED = ("fsdp", "fsdp2")
_ENGINES = ("vllm", "hf")


def outside(script: PurePath, arguments: Sequence[str]) -> str:
    """Return why a call of the trainer is not counted, or an empty text where it is.

    Args:
        script: path of the script below the examples.
        arguments: of the call.
    """
    values = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in arguments)}
    keys = " ".join(values)
    backends = [word for word in _BACKENDS if any(word in argument for argument in arguments)]
    backends += [
        values[key] for key in (f"{_AR}.actor.strategy", f"{_AR}.ref.strategy") if values.get(key, _SHARDED[0]) not in _SHARDED
    ]
    if backends:
        return f"backend {backends[0]}"
    engine = values.get(f"{_AR}.rollout.name", _ENGINES[0])
    if engine not in _ENGINES:
        return f"engine {engine}"
    if "multi_turn" in keys or "multiturn" in values.get("--config-name", ""):
        return "several turns"
    if any(word in keys for word in ("data.image", "vision", "video")):
        return "images or video"
    if any(word in script.as_posix() for word in ("npu", "ascend")) or values.get("trainer.device") == "npu":
        return "an NPU"
    return ""
