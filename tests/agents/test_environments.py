"""A pool of environments: what conversations get, and what happens if the code of one of them goes wrong."""

import pickle
import re
import subprocess
import sys

import pytest

from tests.agents.conftest import GAME
from tests.rewards.processes import all_gone, gone, wait_until
from verl_memopt.agents import environments
from verl_memopt.agents.environments import Answers, Failed, Finished, Ready, Restart
from verl_memopt.rewards.supervisor import LOG_BYTES

TOOLS = '''
import threading

meeting = threading.Barrier(2, timeout=20)

def meet(name: str) -> str:
    """Meet.

    Args:
        name: Who.
    """
    meeting.wait()
    return name

async def search(name: str) -> list:
    """Search.

    Args:
        name: What.
    """
    return [{"type": "text", "text": name}, {"type": "text", "text": "!"}]

def show() -> list:
    """Show."""
    return [{"type": "image", "image": "..."}]
'''


def test_a_conversation_from_its_begin_to_its_reward(talk):
    talk = talk()
    kind = talk.pool.wait_until_loaded()[None]
    assert (kind.class_name, kind.has_reward) == ("Game", True)
    assert {schema["function"]["name"] for schema in kind.schemas} >= {"add", "wait", "crash"}
    assert talk.begin(7, prompt="p", seed=5, answer=[1]) == Ready(7, "ready p")
    assert talk.call(7, "add", number=2) == Answers(7, [("2", False)])
    assert talk.call(7, "add", number=3) == Answers(7, [("5", False)])
    finished = talk.finish(7)
    assert isinstance(finished, Finished)
    assert finished.reward == 5.0
    for snapshot in (finished.snapshot, pickle.loads(pickle.dumps(finished.snapshot))):
        assert (snapshot.total, snapshot.seed, snapshot.row) == (5, 5, {"answer": [1]})


def test_an_environment_is_made_once_and_its_plain_code_has_one_thread(talk):
    talk = talk()
    for _ in range(3):
        assert talk.begin(0) == Ready(0, None)
        talk.call(0, "add", number=1)
        snapshot = talk.finish(0).snapshot
        assert (snapshot.made, snapshot.total) == (1, 1)
    assert len(set(snapshot.threads)) == 1


def test_an_attribute_of_a_class_of_the_users_file_can_be_read_in_another_process(talk):
    body = "self.point = Point(3)\n        self.total, "
    talk = talk(GAME.replace("self.total, ", body) + "\nclass Point:\n    def __init__(self, x):\n        self.x = x\n")
    talk.begin(0)
    assert talk.finish(0).snapshot.point.x == 3


def test_a_row_chooses_its_environment_by_name(talk):
    other = "class Other:\n    def reset(self, **row):\n        return f'other {sorted(row)}'\n"
    talk = talk(GAME + other, {"game": "Game", "other": "Other"})
    kinds = talk.pool.wait_until_loaded()
    assert {name: (kind.class_name, len(kind.schemas) > 0) for name, kind in kinds.items()} == {
        "game": ("Game", True),
        "other": ("Other", False),
    }
    assert talk.begin(0, "game", environment="game", prompt="p") == Ready(0, "ready p")
    assert talk.begin(1, "other", environment="other", prompt="p") == Ready(1, "other ['prompt']")
    assert talk.call(1, "add", number=1).answers == [(str({"error": "Tool add not found."}), True)]
    assert talk.begin(2, "third").reason == "environment='third' is none of the environments ('game', 'other')"
    assert isinstance(talk.begin(3), Failed)


def test_what_cannot_leave_the_process_says_so_when_it_is_read(talk):
    body = "self.lock, self.large, self.odd = threading.Lock(), bytes(2**21), Odd()\n        self.total, "
    odd = "\nclass Odd:\n    def __reduce__(self):\n        return int, ('x',)\n"
    talk = talk(GAME.replace("self.total, ", body) + odd)
    talk.begin(0)
    snapshot = talk.finish(0).snapshot
    for name, said in [
        ("lock", "cannot leave"),
        ("large", "bytes can leave"),
        ("odd", "restored"),
        ("other", "no such attribute"),
    ]:
        with pytest.raises(AttributeError, match=rf"Game\.{name} cannot be read by a reward function: .*{said}"):
            getattr(snapshot, name)


def test_what_goes_wrong_in_a_tool_is_told_to_the_model_in_trls_words(talk):
    talk = talk()
    talk.begin(0)
    calls = [("lose", {}), ("leave", {}), ("nothing", {}), ("add", {"name": 1}), ("reset", {}), ("add", "1")]
    talk.pool.call(0, [*calls, ("add", {"number": 4})])
    answers = talk.next(0).answers
    assert [failed for _, failed in answers] == [True] * 6 + [False]
    assert answers[0][0] == str({"error": "Game over."})
    assert answers[1][0] == str({"error": "left"})
    assert answers[2][0] == str({"error": "Tool nothing not found."})
    assert "unexpected keyword argument 'name'" in answers[3][0]
    assert answers[4][0] == str({"error": "Tool reset not found."})
    assert answers[6][0] == "4"


ALARMED = '''
import signal

def look() -> str:
    """Look, with an alarm that Python allows in the main thread only."""
    before = signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
    signal.alarm(1)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.signal(signal.SIGALRM, before)
    return "seen"
'''


def test_a_tool_that_limits_its_own_time_by_an_alarm_runs(talk):
    talk = talk(ALARMED, name={}, tools=["look"])
    talk.begin(0)
    assert [talk.call(0, "look").answers for _ in range(3)] == [[("seen", False)]] * 3


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "(truncated).........z"), ("right", "a.........(truncated)"), ("middle", "a.....(truncated).....z")],
)
def test_a_long_answer_is_cut_as_in_verl(talk, side, text):
    talk = talk(max_tool_response_length=7 if side != "middle" else 6, tool_response_truncate_side=side)
    talk.begin(0)
    assert talk.call(0, "text", length=7 if side != "middle" else 6).answers[0][0].count("truncated") == 0
    assert talk.call(0, "text", length=2**20).answers == [(text, False)]


def test_the_calls_of_one_turn_run_together_and_plain_methods_in_order(talk):
    talk = talk()
    talk.begin(0)
    talk.pool.call(0, [("wait", {}), ("add", {"number": 1}), ("add", {"number": 50}), ("meet", {})])
    assert talk.next(0).answers == [("met", False), ("1", False), ("51", False), ("set", False)]


def test_functions_run_together_and_need_no_environment(talk):
    talk = talk(TOOLS, name={}, tools=["meet", "search", "show"])
    assert [schema["function"]["name"] for schema in talk.pool.wait_until_loaded()[None].schemas] == ["meet", "search", "show"]
    assert talk.begin(0) == Ready(0, None)
    talk.pool.call(0, [("meet", {"name": "a"}), ("search", {"name": "b"}), ("meet", {"name": "c"})])
    assert talk.next(0).answers == [("a", False), ("b!", False), ("c", False)]
    assert talk.begin(1) == Ready(1, None)
    assert "only text is possible" in talk.call(1, "show").reason
    assert talk.finish(0).reward is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no\\nboard')", r"reset raised ValueError: no board in .*game\.py:5"),
        ("return 3", "reset returned int; return a text"),
        ("return [{'role': 'user', 'content': object()}]", "not plain data"),
        ("return 'a' * 2**23", "at most"),
    ],
)
def test_a_reset_that_goes_wrong_fails_its_conversation(talk, text, said):
    talk = talk(f"class Game:\n    def reset(self, bad, **row):\n        if not bad:\n            return None\n        {text}\n")
    reason = talk.begin(0, bad=True).reason
    assert "\n" not in reason
    assert re.search(said, reason), reason
    assert talk.begin(0, bad=False) == Ready(0, None)


ENDINGS = {
    "hang": r"hang took longer than environment\.timeout_seconds=1$",
    "hang_async": r"hang_async took longer than environment\.timeout_seconds=1$",
    "flood": r"flood took longer than environment\.timeout_seconds=1$",
    "block": r"block took longer than environment\.timeout_seconds=1, and let nothing else run",
    "hold": r"hold took longer than environment\.timeout_seconds=1, and let nothing else run",
    "crash": "crash ended its process, which exited with code 3",
    "crash_async": "crash_async ended its process, which exited with code 3",
    "take_memory": r"take_memory needed more memory than environment\.memory_gb=0\.5",
    "burn": r"burn ended its process, which took more processor time than environment\.cpu_seconds=1",
    "close_all": "close_all ended its process",
}
"""Tool -> why its conversation fails."""


@pytest.mark.parametrize("tool", ENDINGS)
def test_a_call_that_goes_wrong_fails_its_conversation_and_no_other(talk, tmp_path, monkeypatch, tool):
    monkeypatch.setattr(environments, "GRACE_SECONDS", 0.5)
    soon = tool not in ("burn", "close_all")
    talk = talk(timeout_seconds=1.0 if soon else 90.0, memory_gb=0.5, cpu_seconds=1.0 if tool == "burn" else 60.0)
    assert [talk.begin(number) for number in range(2)] == [Ready(0, None), Ready(1, None)]
    failed = talk.call(0, tool)
    assert isinstance(failed, Failed)
    assert re.search(ENDINGS[tool], failed.reason), failed.reason
    assert "\n" not in failed.reason
    if (tmp_path / "logs").exists():
        assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) < 2 * LOG_BYTES
    for number in range(2):
        assert talk.finish_again(number).reward == 0.0


def test_of_several_that_were_running_each_goes_on_alone_and_the_one_at_fault_fails(talk):
    talk = talk(GAME.replace("time.sleep(seconds)", "time.sleep(seconds) if seconds < 5 else os._exit(3)"))
    for number in range(3):
        talk.begin(number)
    talk.pool.call(0, [("nap", {"seconds": 2})])
    talk.pool.call(1, [("nap", {"seconds": 1}), ("crash", {})])
    talk.pool.call(2, [("sleep", {"seconds": 100})])  # waits on the event loop, so it runs no code
    assert [talk.next(number) for number in range(3)] == [Restart(0), Restart(1), Restart(2)]
    pids = [talk.begin(number) and int(talk.call(number, "pid").answers[0][0]) for number in range(3)]
    assert len(set(pids)) == 3
    assert "exited with code 3" in talk.call(1, "crash").reason
    assert talk.call(0, "nap", seconds=0.1).answers == [("slept", False)]
    assert talk.finish(0).reward == talk.finish(2).reward == 0.0
    assert all_gone(pids[:2])  # a process that had one conversation alone ends with it


def test_conversations_that_crashes_of_others_begin_again_share_a_process(talk):
    talk = talk()
    for crashing in range(2, 5):
        for number in (0, 1, crashing):
            talk.begin(number)
        assert isinstance(talk.call(crashing, "crash"), Failed)
        assert [talk.next(number) for number in (0, 1)] == [Restart(0), Restart(1)]
    assert len({talk.begin(number) and talk.call(number, "pid").answers[0] for number in (0, 1)}) == 1


def test_a_process_with_a_call_that_does_not_end_is_replaced_once_it_is_empty(talk):
    talk = talk(timeout_seconds=1.0)
    talk.begin(0)
    talk.begin(1)
    old = int(talk.call(1, "pid").answers[0][0])
    assert isinstance(talk.call(0, "hang"), Failed)
    talk.begin(2)
    assert int(talk.call(2, "pid").answers[0][0]) != old
    assert int(talk.call(1, "pid").answers[0][0]) == old
    talk.finish(1)
    assert wait_until(lambda: gone(old))
    assert talk.finish(2).reward == 0.0


def test_a_conversation_whose_process_dies_again_and_again_fails(talk):
    body = "threading.Timer(0.05, os._exit, [3]).start()\n        self.total, "
    talk = talk(GAME.replace("self.total, ", body, 1))
    for _ in range(environments.MOST_RESTARTS):
        talk.pool.begin(0, None, {})
        while isinstance(event := talk.next(0), Ready):
            pass
        assert event == Restart(0)
    talk.pool.begin(0, None, {})
    while isinstance(event := talk.next(0), Ready):
        pass
    assert "exited with code 3" in event.reason


SLOW_TO_DESCRIBE = """
def slow():
    time.sleep(2)
    return int
"""


def test_what_a_lost_conversation_said_before_is_not_told(talk):
    """Otherwise a caller would go on with it, although it has to begin again."""
    dies = "if row: threading.Timer(0.05, os._exit, [3]).start()\n        self.total, "
    talk = talk(
        GAME.replace("self.total, ", dies, 1).replace("number: int", 'number: "slow()"') + SLOW_TO_DESCRIBE, num_workers=2
    )
    talk.pool.begin(0, None, {})
    talk.pool.begin(1, None, {"dies": True})
    talk.pool.wait_until_loaded()  # takes so long that the other process has died
    assert [event for event in talk.pool.poll(0) if event.conversation == 1] == [Restart(1)]


@pytest.mark.parametrize("tool", ["fork", "fork_async"])
def test_a_forked_child_that_returns_from_a_tool_ends_and_says_nothing(talk, tool):
    talk = talk()
    talk.begin(0)
    child = int(talk.call(0, tool).answers[0][0])
    assert wait_until(lambda: gone(child))
    assert talk.call(0, "add", number=1).answers == [("1", False)]
    assert talk.finish(0).reward == 1.0


def test_a_set_has_the_same_order_in_every_process(talk):
    talk = talk(num_workers=3)
    for number in range(3):
        talk.begin(number)
    assert len({talk.call(number, "pid").answers[0] for number in range(3)}) == 3
    assert len({talk.call(number, "names").answers[0] for number in range(3)}) == 1


def test_two_hundred_conversations_at_once(talk):
    talk, numbers = talk(num_workers=2), range(200)
    for number in numbers:
        talk.pool.begin(number, None, {})
    for number in numbers:
        assert talk.next(number) == Ready(number, None)
        talk.pool.call(number, [("add", {"number": number + 1}), ("sleep", {"seconds": 0.2})])
    for number in numbers:
        assert talk.next(number).answers == [(str(number + 1), False), ("slept", False)]
        talk.pool.finish(number)
    assert [talk.next(number).reward for number in numbers] == [number + 1 for number in numbers]
    assert len(talk.pool.pids()) == 2


def test_a_large_row_reaches_an_environment_that_is_still_loading(talk):
    talk = talk()
    for number in range(3):
        talk.pool.begin(number, None, {"large": bytes(2**23)})
    assert [talk.next(number) for number in range(3)] == [Ready(number, None) for number in range(3)]


def test_an_abandoned_conversation_says_nothing_and_its_number_is_free(talk):
    talk = talk()
    talk.begin(0)
    talk.pool.call(0, [("sleep", {"seconds": 100}), ("nap", {"seconds": 0.3})])
    talk.pool.abandon(0)
    assert talk.begin(0) == Ready(0, None)
    assert talk.call(0, "nap", seconds=0.5).answers == [("slept", False)]
    assert talk.finish(0).reward == 0.0
    assert not any(talk.events.values())


PARENT = """
import sys
from verl_memopt.agents.environments import EnvironmentPool
from verl_memopt.agents.program import Program
from verl_memopt.agents.tools import Source
from verl_memopt.rewards.score import Limits
pool = EnvironmentPool(Program({None: Source(sys.argv[1], "Game")}), Limits(4.0, 60.0, 4096), 2)
pids = []
for number in range(2):
    pool.begin(number, None, {})
    pool.poll(20)
    pool.call(number, [("start", {})])
    pids.append(pool.poll(20)[0].answers[0][0])
    pool.call(number, [("hang", {})])
print(*pids, *pool.pids(), flush=True)
sys.stdin.read()
pool.close()
"""


@pytest.mark.parametrize("kills", [True, False])
def test_no_process_is_left_when_the_run_is_killed_or_closes(tmp_path, kills):
    start = '''
    def start(self) -> str:
        """Start a process."""
        import subprocess
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        return f"{child.pid} {os.getpid()}"
'''
    (tmp_path / "game.py").write_text(GAME + start)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "game.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        pids = [int(text) for text in running.stdout.readline().split()]
        assert len(set(pids)) == 6
        if kills:
            running.kill()
        running.communicate()
    assert all_gone(pids) if kills else all(gone(pid) for pid in pids)
