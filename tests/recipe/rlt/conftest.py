"""Settings, a tokenizer and data files, as the tests of configuration and of data have them."""

from tests.config.conftest import complaint, least, settled
from tests.data.conftest import jsonl, tokenizer

__all__ = ["complaint", "jsonl", "least", "settled", "tokenizer"]
