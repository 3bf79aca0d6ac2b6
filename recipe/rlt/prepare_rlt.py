"""Write train.parquet and val.parquet for RLT, from local files or from the hub.

python recipe/rlt/prepare_rlt.py --files mine.jsonl --out data/rlt
python recipe/rlt/prepare_rlt.py --hub bespokelabs/Bespoke-Stratos-17k --out data/rlt --model Qwen/Qwen2.5-1.5B-Instruct

A row has the columns question and solution, and reasoning_trace for the warm-up of a teacher; prompt is another name of question.
Or it has the column conversations of Bespoke-Stratos-17k. Rows that cannot be trained on are left out and counted.
"""

import argparse
import logging

from verl_memopt.errors import UserError
from verl_memopt.recipes.rlt.dataset import DATASET, FORMATS, prepare_rlt, token_lengths


def main() -> None:
    """Read the command line and prepare the files; end with 2 where the data has something wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--files", nargs="+", default=[], help="your files: .parquet, .json, .jsonl")
    source.add_argument("--hub", default=DATASET, help="dataset id on the hub (default: %(default)s)")
    parser.add_argument("--val-files", nargs="+", default=[], help="held-out rows (default: some rows are held out)")
    parser.add_argument("--num-validation", type=int, default=128, help="rows to hold out (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides which rows are held out (default: %(default)s)")
    parser.add_argument("--tag-format", choices=list(FORMATS), default="stratos", help="reward_model.rlt.tag_format")
    parser.add_argument("--out", default="data/rlt", help="folder for the two files (default: %(default)s)")
    parser.add_argument("--model", help="print token lengths with this model's tokenizer, to choose the two lengths of data")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        prepared = prepare_rlt(
            arguments.out, arguments.files, arguments.val_files, arguments.hub, arguments.tag_format,
            arguments.num_validation, arguments.seed,
        )  # fmt: skip
        if arguments.model:
            from verl_memopt.model.folder import read_tokenizer, resolve_folder

            tokenizer = read_tokenizer(resolve_folder(arguments.model, "--model"), "--model", False)
            for name, lengths in token_lengths(prepared.rows["train"], tokenizer, arguments.tag_format).items():
                words = ", ".join(f"{word} {length:,}" for word, length in lengths.items())
                logging.info("rlt: tokens of each %s: %s", name, words)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
