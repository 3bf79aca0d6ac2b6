"""What reward functions print is kept, in files that stay small, and its end is quoted."""

import os
from pathlib import Path

from verl_memopt.rewards.supervisor import LOG_BYTES, OutputLog, last_lines


def test_a_log_is_made_at_the_first_write_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    log = OutputLog(path)
    assert not path.parent.exists()
    log.write(b"one\n")
    OutputLog(path).write(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_log_never_grows_past_its_limit_and_keeps_whole_lines_of_the_end(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "a.log")
    lines = [b"%06d %s\n" % (number, b"x" * 992) for number in range(3000)]
    for line in lines:
        log.write(line)
        assert log.path.stat().st_size <= LOG_BYTES
    kept = log.path.read_bytes()
    assert b"".join(lines).endswith(kept)
    assert kept.splitlines(keepends=True)[0] in lines
    assert len(kept) > LOG_BYTES // 2 - 1000
    assert os.listdir(tmp_path) == ["a.log"]


def test_a_disk_that_refuses_loses_the_output_and_says_so_once(tmp_path: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    log = OutputLog(tmp_path / "file" / "a.log")
    log.write(b"lost\n")
    log.write(b"lost\n")
    said = capfd.readouterr().err
    assert said == f"{log.path}: the output of a reward function cannot be written (File exists).\n"


def test_the_last_lines_are_quoted_under_the_name_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number}\n\n" for number in range(9)))
    assert last_lines(path) == f"\n  its last output ({path}):\n  line 4\n  line 5\n  line 6\n  line 7\n  line 8"


def test_what_an_earlier_process_printed_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\n")
    assert last_lines(path, since=4) == ""
    path.write_text("old\nnew\n")
    assert last_lines(path, since=4) == f"\n  its last output ({path}):\n  new"
    path.write_text("cut\n")
    assert "cut" in last_lines(path, since=400)


def test_no_log_and_no_file_give_nothing_to_quote(tmp_path: Path) -> None:
    assert last_lines(None) == last_lines(tmp_path / "absent.log") == ""
