"""A judge that answers, fails, hangs and recovers, over real HTTP on this machine."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.conftest import rows
from verl_memopt.config.schema import CustomReward
from verl_memopt.errors import RewardError
from verl_memopt.rewards.judge import LARGEST_ANSWER_BYTES, LongAnswerError, Patience, ask, ask_async
from verl_memopt.rewards.runner import RewardRunner

ROOT = Path(__file__).parents[2]
Behaviour = Callable[[BaseHTTPRequestHandler, Any], None]
QUICK = Patience(limit_seconds=20, attempt_seconds=10, attempts=4, backoff_seconds=0.001)


def reply(handler, status, text, **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


def echoes(handler, body):
    reply(handler, 200, json.dumps({"seen": body}).encode())


class Judge:
    """A server on this machine. ``behaviours`` are taken in turn, the last one for good."""

    def __init__(self):
        self.behaviours = [echoes]
        self.requests = []
        self.most_at_once = self._at_once = 0
        self.released = threading.Event()
        lock = threading.Lock()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    judge.requests.append((self.path, body, dict(self.headers)))
                    behaviour = judge.behaviours.pop(0) if len(judge.behaviours) > 1 else judge.behaviours[0]
                    judge._at_once += 1
                    judge.most_at_once = max(judge.most_at_once, judge._at_once)
                try:
                    behaviour(self, body)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                finally:
                    with lock:
                        judge._at_once -= 1

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}/grade?of=tests"

    def hangs(self, handler, body):
        self.released.wait(60)

    def drips(self, handler, body):
        """Sends the headers and then a byte from time to time, for ever."""
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        while not self.released.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    def drips_headers(self, handler, body):
        """Sends the headers byte by byte, for ever."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nServer: ")
        while not self.released.wait(0.02):
            handler.wfile.write(b"x")
            handler.wfile.flush()


@pytest.fixture
def judge():
    judge = Judge()
    yield judge
    judge.released.set()
    judge.server.shutdown()
    judge.server.server_close()


def fails(status, text=b"", **headers):
    return lambda handler, body: reply(handler, status, text, **headers)


def cut_short(handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"score":')


def hangs_up(handler, body):
    handler.connection.shutdown(socket.SHUT_RDWR)


def test_the_body_arrives_as_json_with_the_headers_and_the_answer_comes_back(judge):
    patience = Patience(headers={"Authorization": "Bearer me"})
    assert ask(judge.url, {"text": "schön"}, patience) == {"seen": {"text": "schön"}}
    [(path, body, headers)] = judge.requests
    assert (path, body) == ("/grade?of=tests", {"text": "schön"})
    assert (headers["Authorization"], headers["Content-Type"]) == ("Bearer me", "application/json")


@pytest.mark.parametrize("trouble", [fails(503), fails(200, b"not json"), cut_short, hangs_up])
def test_a_judge_that_recovers_is_asked_again(judge, trouble):
    judge.behaviours = [trouble, trouble, echoes]
    assert ask(judge.url, 1, QUICK) == {"seen": 1}
    assert len(judge.requests) == 3


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (fails(503, b"no  room\n"), r"HTTP status 503 Service Unavailable \(no room\)"),
        (fails(200, b"{"), "its answer is no JSON"),
        (cut_short, "the answer ended early|IncompleteRead"),
        (hangs_up, "RemoteDisconnected|ConnectionResetError"),
    ],
)
def test_a_judge_that_keeps_failing_is_one_error_with_the_attempts_and_the_last_reason(judge, trouble, reason):
    judge.behaviours = [trouble]
    with pytest.raises(RewardError, match=rf"the judge at {judge.url.replace('?', '.')} gave no answer in 4 attempts.*{reason}"):
        ask(judge.url, 1, QUICK)
    assert len(judge.requests) == 4


def test_a_request_that_is_wrong_is_not_repeated(judge):
    judge.behaviours = [fails(404, b"no such model")]
    with pytest.raises(RewardError, match=r"refused the request: HTTP status 404 Not Found \(no such model\)"):
        ask(judge.url, 1, QUICK)
    assert len(judge.requests) == 1


def test_an_answer_that_is_too_long_is_not_read_to_its_end_and_not_asked_for_again(judge):
    sent = []

    def pours(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", str(8 * LARGEST_ANSWER_BYTES))
        handler.end_headers()
        for _ in range(8):
            sent.append(handler.wfile.write(bytes(LARGEST_ANSWER_BYTES)))

    judge.behaviours = [pours]
    with pytest.raises(LongAnswerError, match=f"answered with over {LARGEST_ANSWER_BYTES} bytes"):
        ask(judge.url, 1, QUICK)
    assert (len(sent) < 8, len(judge.requests)) == (True, 1)
    judge.behaviours = [fails(200, b" " * (LARGEST_ANSWER_BYTES - 1) + b"1")]
    assert ask(judge.url, 1, QUICK) == 1


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("localhost:1/x", "no http or https URL"),
        ("file:///etc/passwd", "no http or https URL"),
        ("http:///x", "no http or https URL"),
        ("http://[::1", "IPv6"),
        ("http://127.0.0.1:port/", "port"),
        ("http://127.0.0.1:70000/", "range"),
        ("http://127.0.0.1:1/a b", "control characters"),
        ("http://127.0.0.1:1/\u00fc", "ascii"),
        ("http://a..b/", "label"),
        ("http://me:pa55word@127.0.0.1:1/", "user or a password"),
    ],
)
def test_an_address_that_cannot_be_asked_is_refused_at_once(address, why):
    with pytest.raises(RewardError, match=f"(?i)^the judge's address '.*' cannot be used: .*{why}") as refused:
        ask(address, 1, pause=pytest.fail)
    assert "pa55word" not in str(refused.value)


@pytest.mark.parametrize("value", ["Bearer abcd1234\n", "Bearer abcd1234 \u0416", None])
def test_a_header_that_cannot_be_sent_is_named_without_its_value(judge, value):
    with pytest.raises(RewardError, match="the judge's header 'Authorization' cannot be sent") as refused:
        ask(judge.url, 1, Patience(headers={"Authorization": value}))
    assert "abcd" not in str(refused.value)
    assert judge.requests == []


@pytest.mark.parametrize("status", [301, 307])
def test_no_redirection_takes_the_headers_to_another_place(judge, status):
    elsewhere = Judge()
    judge.behaviours = [fails(status, Location=elsewhere.url)]
    with pytest.raises(RewardError, match=rf"refused the request: HTTP status {status} .*, which names {elsewhere.url[:20]}"):
        ask(judge.url, 1, Patience(headers={"Authorization": "Bearer me"}))
    elsewhere.server.shutdown()
    elsewhere.server.server_close()
    assert (len(judge.requests), elsewhere.requests) == (1, [])


def steers(handler, body):
    handler.wfile.write(b"HTTP/1.1 404 \x1b]0;mine\x07\r\nContent-Length: 9\r\n\r\n\x1b[2J\xc2\x9b31m")


def no_status(handler, body):
    handler.wfile.write(b"\x1b[2J\r\n\r\n")


@pytest.mark.parametrize("trouble", [steers, no_status])
def test_what_a_judge_sends_steers_no_terminal(judge, trouble):
    judge.behaviours = [trouble]
    with pytest.raises(RewardError, match=r"\\x1b\[2J") as error:
        ask(judge.url, 1, QUICK)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("asked", ["99999999999", "9" * 400])
def test_a_judge_that_asks_for_a_pause_beyond_the_limit_is_not_waited_for(judge, asked):
    judge.behaviours = [fails(429, Retry_After=asked)]
    with pytest.raises(RewardError, match="in 1 attempt "):
        ask(judge.url, 1, QUICK, pause=pytest.fail)


def test_nobody_listening_is_an_error_that_says_so(judge):
    judge.server.shutdown()
    judge.server.server_close()
    with pytest.raises(RewardError, match=r"in 4 attempts.*ConnectionRefusedError.*Start the judge"):
        ask(judge.url, 1, QUICK)


@pytest.mark.parametrize("way", ["hangs", "drips", "drips_headers"])
def test_an_attempt_has_a_time_limit_and_the_next_one_may_succeed(judge, way):
    judge.behaviours = [getattr(judge, way), echoes]
    patience = Patience(limit_seconds=20, attempt_seconds=0.3, attempts=3, backoff_seconds=0.001)
    assert ask(judge.url, 1, patience) == {"seen": 1}
    assert len(judge.requests) == 2


def test_all_attempts_together_have_a_time_limit(judge):
    judge.behaviours = [judge.hangs]
    patience = Patience(limit_seconds=0.5, attempt_seconds=0.2, attempts=1000, backoff_seconds=0.001)
    with pytest.raises(RewardError, match=r"in [2-9] attempts and at most 0\.5 s.*no answer within"):
        ask(judge.url, 1, patience)


def test_pauses_double_and_heed_what_the_judge_asks_for(judge):
    judge.behaviours = [fails(503), fails(503), fails(429, Retry_After="7"), echoes]
    pauses = []
    ask(judge.url, 1, Patience(limit_seconds=60, backoff_seconds=1.0), pause=pauses.append)
    judge.behaviours = [fails(429, Retry_After="\u00b2"), fails(200, b"[" * 100_000), echoes]
    assert ask(judge.url, 1, QUICK, pause=pauses.append) == {"seen": 1}
    assert 1 <= pauses[0] <= 1.5
    assert 2 <= pauses[1] <= 3
    assert pauses[2] == 7.0


def test_many_rows_wait_for_the_judge_at_a_time(judge):
    all_there = threading.Barrier(8)

    def waits_for_eight(handler, body):
        all_there.wait(30)
        echoes(handler, body)

    judge.behaviours = [waits_for_eight]

    async def eight():
        return await asyncio.gather(*(ask_async(judge.url, number) for number in range(8)))

    assert asyncio.run(eight()) == [{"seen": number} for number in range(8)]


EXAMPLE = str(ROOT / "examples" / "rewards" / "judge.py")


def says(text):
    answer = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
    return lambda handler, body: reply(handler, 200, answer)


def graded(judge, **settings):
    return CustomReward(path=EXAMPLE, reward_kwargs={"url": judge.url, "model": "m"}, **settings)


def test_the_example_asks_a_judge_for_each_row_and_survives_a_failure(judge):
    judge.behaviours = [fails(503), says(" 7."), says("well done"), says("10")]
    with RewardRunner(graded(judge), 1, max_concurrent=1) as runner:
        results = runner.score(rows("a", "b", "c"))
    assert [(r.score, r.extra["graded"]) for r in results] == [(0.7, True), (0.0, False), (1.0, True)]
    assert "Answer of a student:\na\n" in judge.requests[0][1]["messages"][0]["content"]
    assert len(judge.requests) == 4


def test_a_judge_that_hangs_is_a_row_over_its_time_limit(judge):
    judge.behaviours = [judge.hangs]
    settings = graded(judge, timeout_seconds=0.5, on_error="score", fallback_score=-1.0)
    with RewardRunner(settings, 1) as runner:
        runner.check()
        results = runner.score(rows("a", "b"))
    assert [(r.score, r.failed) for r in results] == [(-1.0, True), (-1.0, True)]
