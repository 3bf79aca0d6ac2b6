"""Writes train.parquet and test.parquet of GSM8K, from local files or from the hub.

python recipe/rloo/prepare_gsm8k.py --local-dir ~/gsm8k/main --out data/gsm8k
python recipe/rloo/prepare_gsm8k.py --hub openai/gsm8k --out data/gsm8k
"""

import argparse
import logging

from verl_memopt.data.gsm8k import DATA_SOURCE, prepare_gsm8k
from verl_memopt.errors import UserError


def main() -> None:
    """Reads the command line and prepares the files; ends with 2 when the data has something wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--local-dir", help="folder with train* and test* files (.parquet, .json, .jsonl)")
    source.add_argument("--hub", default=DATA_SOURCE, help="dataset id on the hub (default: %(default)s)")
    parser.add_argument("--out", default="data/gsm8k", help="folder for the two files (default: %(default)s)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prepare_gsm8k(arguments.out, local_dir=arguments.local_dir, hub_id=arguments.hub)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
