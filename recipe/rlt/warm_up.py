"""Teach a model to write explanations before RL: supervised, under the memory knobs of the policy's update.

python recipe/rlt/warm_up.py actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct data.train_files=data/rlt/train.parquet

The last line names the folder of the model. It starts the RL run.
"""

import sys
from pathlib import Path

from verl_memopt.errors import UserError
from verl_memopt.run.interrupts import SignalWatch

CONFIG_DIR = Path(__file__).parent / "config"


def main() -> int:
    watch = SignalWatch()
    try:
        from verl_memopt.cli import sft

        return sft(None, "python recipe/rlt/warm_up.py", "warm_up", str(CONFIG_DIR))
    except UserError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    finally:
        watch.hold_while_ending()


if __name__ == "__main__":
    sys.exit(main())
