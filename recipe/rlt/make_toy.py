"""Make RLT's toy task: a tiny warmed-up teacher, a tiny student, and sums with explanations.

python recipe/rlt/make_toy.py runs/rlt_toy_seed0 --seed 0
"""

import argparse
from pathlib import Path

from verl_memopt.errors import UserError
from verl_memopt.observe.log_setup import setup_logging
from verl_memopt.recipes.rlt.lessons import make_rlt_toy


def main() -> None:
    """Make the toy task of the command line. A folder that has it already is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to put teacher/, student/, train.parquet and val.parquet")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and warm-up (default: 0)")
    arguments = parser.parse_args()
    setup_logging()
    try:
        make_rlt_toy(arguments.folder, seed=arguments.seed)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
