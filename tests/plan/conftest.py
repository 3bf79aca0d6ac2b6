"""The files of a tiny run, which the tests of the trainer make."""

from tests.trainer.conftest import run_files

__all__ = ["run_files"]
