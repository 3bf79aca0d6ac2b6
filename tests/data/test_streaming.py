"""Rows that are read as steps need them: their order, a resume, their end, and how far ahead they are read."""

import itertools
import json
import logging
import re

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from verl_memopt.config.schema import CustomClass, Data
from verl_memopt.data import sources
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.prompts import PromptPrefetcher
from verl_memopt.data.python_rows import PythonRows, stream_of, with_length, write_rows
from verl_memopt.data.responses import stream_reader
from verl_memopt.data.streaming import FileRows, StreamLoader, open_stream
from verl_memopt.errors import ConfigError, DataError, StreamEndedError

from .conftest import row


def made(number):
    return {"prompt": f"{number}+1=", "answer": str(number + 1)}


def columns_of(items):
    from verl_memopt.data.dataset import PromptRow

    return [PromptRow(-1, columns["prompt"], "s", columns["answer"], {}, address) for address, columns in items]


def loader(given, batch=4, buffer=0, seed=0, **more):
    return StreamLoader(PythonRows(given, "dataset"), columns_of, batch, seed, buffer, **more)


def take(loader, steps):
    return [[loader.dataset[index].text for index in loader.next_indices()] for _ in range(steps)]


def rows(count):
    return lambda: map(made, range(count))


@given(st.integers(4, 40), st.integers(1, 6), st.integers(0, 50), st.integers(0, 99), st.integers(0, 9), st.integers(0, 9))
def test_a_resumed_stream_goes_on_exactly_as_the_uninterrupted_one(count, batch, buffer, seed, before, after):
    batch = min(batch, count)
    whole = take(loader(rows(count), batch, buffer, seed), before + after)
    first = loader(rows(count), batch, buffer, seed)
    take(first, before)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = loader(rows(count), batch, buffer, seed + 1)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state, "a run that is stopped again before it reads anything has lost nothing"
    assert take(resumed, after) == whole[before:]


@given(st.integers(4, 40), st.integers(0, 50), st.integers(0, 99))
def test_a_pass_shows_no_row_twice_and_the_next_has_its_own_order(count, buffer, seed):
    stream = loader(rows(count), 4, buffer, seed)
    shown = [text for step in take(stream, count // 4) for text in step]
    assert len(set(shown)) == len(shown) == count - count % 4
    assert stream.epoch == 0
    take(stream, 1)
    assert stream.epoch == 1
    assert take(loader(rows(99), most=8), 3) == take(loader(rows(8)), 3), "a cap takes the first rows of each pass"


def test_the_seed_decides_the_order_within_the_buffer():
    in_order = [[f"{4 * step + i}+1=" for i in range(4)] for step in range(5)]
    assert take(loader(rows(99), buffer=0), 5) == in_order
    drawn = take(loader(rows(99), buffer=8, seed=1), 5)
    assert drawn == take(loader(rows(99), buffer=8, seed=1), 5) != take(loader(rows(99), buffer=8, seed=2), 5)
    assert drawn != in_order
    # A row is drawn only once it is in the buffer.
    places = [int(text.split("+")[0]) for step in drawn for text in step]
    assert all(number < place + 8 for place, number in enumerate(places))


def test_an_endless_stream_is_read_no_further_than_its_buffer():
    pulled = itertools.count()
    stream = loader((made(next(pulled)) for _ in itertools.count()), batch=4, buffer=10)
    take(stream, 3)
    assert next(pulled) <= 3 * 4 + 10


def test_no_thread_reads_a_stream_ahead_of_the_steps(tokenizer):
    """After the last step a generator may block for ever, and what it yields may belong to the thread of the steps."""
    pulled = []
    stream = loader((pulled.append(n) or made(n) for n in itertools.count()), batch=4)
    prefetcher = PromptPrefetcher(stream, 2, "token", PromptEncoder(tokenizer, 100, "error"))
    prefetcher.next()
    state = prefetcher.state_dict()
    prefetcher.next()
    prefetcher.give_back()
    assert prefetcher.state_dict() == state
    prefetcher.close()
    assert len(pulled) == 8


def test_what_can_be_read_once_only_ends_and_goes_on_only_as_a_new_one():
    with pytest.raises(StreamEndedError, match=r"dataset: its 10 rows are used up, .*Give a function that returns"):
        take(loader(map(made, range(10))), 3)
    first = loader(map(made, range(10)))
    take(first, 1)
    again = loader(map(made, range(10)))
    again.load_state_dict(first.state_dict())
    assert take(again, 1) == [[f"{n}+1=" for n in range(4, 8)]]
    again.load_state_dict(first.state_dict())
    with pytest.raises(
        DataError, match=r"dataset: an iterator can be read only once, and this iterator was read before\. Give a new"
    ):
        take(again, 1)


def test_a_stream_with_fewer_rows_than_a_batch_is_refused_with_both_numbers():
    for given_rows in (rows(3), map(made, range(3))):
        with pytest.raises(DataError, match=r"data\.train_batch_size=4: dataset has only 3 rows"):
            take(loader(given_rows), 1)


def test_rows_that_differ_when_they_are_read_again_are_noticed(caplog):
    first = loader(rows(40), buffer=5)
    take(first, 2)
    with caplog.at_level(logging.INFO):
        same, other = loader(rows(40), buffer=5), loader(lambda: map(made, range(1, 41)), buffer=5)
        same.load_state_dict(first.state_dict())
        take(same, 1)
        assert "reading it from the start again, to skip the 8 rows" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        other.load_state_dict(first.state_dict())
        take(other, 1)
    assert "the first 8 rows differ from those of the run that is resumed" in caplog.text


def test_the_place_in_rows_read_whole_is_no_place_in_a_stream():
    with pytest.raises(DataError, match=r"data\.streaming=true: the checkpoint is of a run whose rows were read whole"):
        loader(rows(9)).load_state_dict({"seed": 0, "epoch": 0, "position": 4, "num_rows": 9})


def test_an_iterable_hears_of_its_pass_and_the_first_row_that_is_looked_at_is_not_lost():
    class Epochs:
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([made(10 * self.epoch + n) for n in range(4)])

    stream = loader(Epochs())
    stream.check_first()
    assert take(stream, 2) == [[f"{n}+1=" for n in range(4)], [f"{n}+1=" for n in range(10, 14)]]
    once = loader(map(made, range(4)))
    once.check_first()
    assert take(once, 1) == [[f"{n}+1=" for n in range(4)]]


def raising():
    yield made(0)
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("given_rows", "what"),
    [
        (raising, r"^dataset: row 2 raised KeyError: 'gone' in .*test_streaming\.py:\d+\. Correct it\.$"),
        (lambda: 1 / 0, r"^dataset raised ZeroDivisionError"),
        (lambda: 3, r"^dataset raised TypeError: 'int' object is not iterable"),
        (lambda: iter(["text"]), r"^dataset: row 1 is 'text', which is not a dict"),
        (lambda: iter([{"prompt": object()}]), r"^dataset: row 1: the column 'prompt' cannot be kept"),
        (lambda: iter([]), r"^data\.train_batch_size=4: dataset has only 0 rows"),
    ],
)
def test_a_fault_of_a_users_rows_is_one_line_with_argument_and_row(given_rows, what):
    with pytest.raises(DataError, match=what):
        take(loader(given_rows), 1)


# What streams read, in each of a run's ways.


def of_files(path, tokenizer, supervised=False, by_rules=True, **settings):
    data = Data(**{"train_files": path, "val_files": None, "seed": 0, "streaming": True, "max_prompt_length": 40, **settings})
    read = stream_reader(data, tokenizer, supervised, by_rules)
    return StreamLoader(open_stream(data, tokenizer, None, True), read, 2, 0, 0)


def test_files_are_read_a_line_at_a_time(jsonl, tokenizer):
    stream = of_files(jsonl(row("1+1="), row("2+2="), "no json"), tokenizer)
    stream.check_first()
    assert [text.count("+") for text in take(stream, 1)[0]] == [1, 1]
    with pytest.raises(DataError, match=r"rows\.jsonl:3: not valid JSON"):
        take(stream, 1)
    with pytest.raises(DataError, match="there is no such file"):
        of_files("absent.jsonl", tokenizer)


def test_parquet_is_decoded_part_by_part(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(sources, "PARQUET_ROWS", 3)
    parquet.write_table(pyarrow.Table.from_pylist([row(f"{n}+1=") for n in range(10)]), tmp_path / "rows.parquet")
    stream = of_files(str(tmp_path / "rows.parquet"), tokenizer)
    addresses = [stream.dataset[index].address for _ in range(5) for index in stream.next_indices()]
    assert addresses == [f"{tmp_path / 'rows.parquet'}:{n}" for n in range(1, 11)]


def test_long_prompts_are_dropped_as_they_come_and_no_batch_is_short(jsonl, tokenizer, caplog):
    long = row("1+" * 60)
    path = jsonl(long, row("1+1="), long, long, row("2+2="), row("3+3="), long, row("4+4="))
    stream = of_files(path, tokenizer, filter_overlong_prompts=True)
    with caplog.at_level(logging.INFO):
        shown = take(stream, 4)
    assert [len(step) for step in shown] == [2] * 4
    assert shown[:2] == shown[2:], "two passes"
    assert caplog.text.count("prompts over data.max_prompt_length") == 1
    resumed = of_files(path, tokenizer, filter_overlong_prompts=True)
    again = of_files(path, tokenizer, filter_overlong_prompts=True)
    take(resumed, 1)
    again.load_state_dict(resumed.state_dict())
    assert take(again, 1) == shown[1:2]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the prompt has \d+ tokens, but data\.max_prompt_length is 40"):
        take(of_files(path, tokenizer), 1)


def test_a_stream_of_which_every_row_is_dropped_does_not_run_for_ever(tokenizer):
    data = Data(train_files="", val_files=None, seed=0, max_prompt_length=4, filter_overlong_prompts=True)
    read = stream_reader(data, tokenizer, supervised=False, by_rules=False)
    endless = PythonRows(lambda: itertools.repeat({"prompt": "1+1=1+1="}), "dataset")
    with pytest.raises(DataError, match=r"dataset: 10,\d+ consecutive rows were dropped, .*Raise data\.max_prompt_length"):
        StreamLoader(endless, read, 512, 0, 0).next_indices()


def test_responses_of_a_supervised_stream_are_encoded_and_long_ones_left_out(jsonl, tokenizer):
    rows = [{"prompt": f"{n}+1=", "response": "1" * length} for n, length in enumerate([1, 30, 2, 3, 30, 4])]
    settings = {"max_response_length": 8, "filter_overlong_prompts": True}
    stream = of_files(jsonl(*rows), tokenizer, supervised=True, **settings)
    lengths = [len(stream.dataset[index].response) for _ in range(2) for index in stream.next_indices()]
    assert lengths == [2, 3, 4, 5]  # with the end of the turn


ENDLESS = """
import itertools
from verl_memopt.data.dataset import PromptRow

class Endless:
    def __init__(self, files, data, tokenizer, split): pass
    def __iter__(self):
        return (PromptRow(n, f"{n}+1=", "s", None, {}, f"made:{n}") for n in itertools.count())

class Texts(Endless):
    def __iter__(self): return iter(["a"])

class Places:
    def __init__(self, *arguments): pass
    def __getitem__(self, index): raise IndexError
"""


def test_a_class_of_the_users_own_may_be_endless(tmp_path, tokenizer):
    (tmp_path / "mine.py").write_text(ENDLESS)

    def stream(name):
        return of_files("f", tokenizer, custom_cls=CustomClass(path=str(tmp_path / "mine.py"), name=name))

    assert take(stream("Endless"), 2) == [["0+1=", "1+1="], ["2+1=", "3+1="]]
    with pytest.raises(DataError, match=r"custom_cls\.name=Texts: row 1: __iter__ yielded a str\. Yield a PromptRow"):
        take(stream("Texts"), 1)
    with pytest.raises(DataError, match=r"custom_cls\.name=Places: with data\.streaming=true the class needs __iter__"):
        stream("Places")


def test_rows_of_another_process_are_refused_where_they_are_needed(tokenizer):
    data = Data(train_files="python:dataset", val_files=None, streaming=True)
    with pytest.raises(ConfigError, match=r"data\.train_files=python:dataset: .* Python program .*resume=True"):
        open_stream(data, tokenizer, None, trains=True)
    assert isinstance(open_stream(data, tokenizer, None, trains=False), FileRows)


# Which rows of Python are a stream.


class Claims:
    """Says one length and has another."""

    def __init__(self, length, rows):
        self.length, self.rows = length, rows

    def __len__(self):
        if self.length is None:
            raise TypeError("no length")
        return self.length

    def __iter__(self):
        return iter(self.rows)


def test_rows_without_a_length_are_a_stream_unless_a_buffer_holds_them_all():
    few, many = list(map(made, range(5))), list(map(made, range(1000)))
    for given_rows in (iter(few), lambda: few, Claims(None, few)):
        assert stream_of(given_rows, None) == (few, None)
    for given_rows in (iter(many), lambda: many, Claims(None, many), map(made, itertools.count())):
        dataset, stream = stream_of(given_rows, None)
        assert dataset is None
        assert [columns for _, columns in itertools.islice(stream.rows(0), 1000)] == many, "what was looked at is not lost"
    assert stream_of(many, None) == (many, None)
    assert stream_of(iter(few), False)[1] is None
    assert [columns for _, columns in stream_of(few, True)[1].rows(0)] == few
    for files in ("rows.jsonl", ["a.jsonl", "b.jsonl"]):
        assert stream_of(files, True) == (files, None)


def test_rows_that_are_read_whole_have_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_memopt.data.python_rows.MOST_WITHOUT_LENGTH", 50)
    for endless in (map(made, itertools.count()), lambda: map(made, itertools.count())):
        with pytest.raises(DataError, match=r"eval_dataset: it has no length and more than 50 rows.*val_max_samples"):
            with_length(endless, "eval_dataset")
        assert with_length(lambda: map(made, itertools.count()), "eval_dataset", 3) == [made(n) for n in range(3)]
    with pytest.raises(DataError, match=r"dataset: __len__ of this Claims is 5, but it yields more rows.*streaming=True"):
        write_rows(Claims(5, map(made, itertools.count())), tmp_path / "rows.jsonl", "dataset")


class Ends(Claims):
    """Ends the program instead of giving its length or its fourth row."""

    def __len__(self):
        return super().__len__() if isinstance(self.length, int) else ends(self.length)

    def __iter__(self):
        yield from map(made, range(3))
        ends(self.rows)


def ends(how):
    raise how


@pytest.mark.parametrize("kind", [KeyboardInterrupt, type("Mine", (SystemExit,), {}), GeneratorExit, OSError, ValueError])
def test_rows_that_end_the_program_or_fail_are_one_error_with_their_number(kind, tmp_path):
    place = rf"{kind.__name__}: mine in {re.escape(__file__)}:\d+\. Correct it\.$"
    with pytest.raises(DataError, match=rf"^dataset: row 4 raised {place}"):
        write_rows(Ends(9, kind("mine")), tmp_path / "rows.jsonl", "dataset")
    for streams in (None, True):
        given_rows = Ends(9, kind("mine"))
        with pytest.raises(DataError, match=rf"^dataset: row 4 raised {place}"):
            list(stream_of(given_rows.__iter__, streams)[1].rows(0))
    with pytest.raises(DataError, match=rf"^dataset: __len__ raised {place}"):
        stream_of(Ends(kind("mine"), None), None)


def test_a_reading_that_takes_long_says_so(monkeypatch, caplog):
    monkeypatch.setattr(sources, "READING_SECONDS", 0.01)
    said = []
    monkeypatch.setattr(sources.logger, "warning", lambda text, *values: said.append(text % values))

    def waits():
        for n in itertools.count():
            while n == 3 and not said:
                pass
            if said:
                return
            yield made(n)

    with_length(waits(), "eval_dataset")
    assert "eval_dataset: still reading after" in said[0]
    assert "3 rows so far" in said[0]
