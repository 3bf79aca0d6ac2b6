import os
import signal
import threading
import time

import pytest

from verl_memopt.run.interrupts import Interrupts, process_interrupts


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_asks_and_says_how_the_run_will_end(number, code, caplog):
    with Interrupts() as interrupts:
        assert not interrupts.requested
        assert interrupts.exit_code is None
        os.kill(os.getpid(), number)
        assert interrupts.requested
        assert interrupts.exit_code == code
    assert f"{number.name}: stopping after this step" in caplog.text


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_of_either_kind_stops_at_once(second):
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
        assert interrupts.exit_code == 143


def test_work_with_nothing_to_finish_is_stopped_by_the_first_signal(caplog):
    with Interrupts(at_once=True) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.exit_code == 143
    assert caplog.text == ""


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_handlers_are_given_back_even_after_an_error():
    before = handlers()
    with Interrupts():
        assert handlers() != before
    assert handlers() == before
    with pytest.raises(ZeroDivisionError), Interrupts():
        divmod(1, 0)
    assert handlers() == before


def test_a_hangup_that_is_ignored_stays_ignored_as_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_no_handler_is_set():
    before, inside = handlers(), []

    def enter():
        with Interrupts():
            inside.append(handlers())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [before]


def test_a_process_whose_signals_nobody_watches_gets_new_interrupts_each_time():
    assert process_interrupts() is not process_interrupts()


def asked_in_steps(deadline, save_seconds=0.0):
    """Interrupts that were asked while steps are taken, and the moments at which rollouts were told to end."""
    interrupts, told = Interrupts(), []
    interrupts.save_seconds = save_seconds
    interrupts.begin_steps(deadline, told.append)
    interrupts.request(signal.SIGTERM)
    return interrupts, told


def test_a_quarter_of_the_deadline_is_kept_for_saving_and_more_where_saves_are_long():
    interrupts, _ = asked_in_steps(100)
    assert not interrupts.too_late_for(74)
    assert interrupts.too_late_for(76)
    assert not interrupts.out_of_time()
    interrupts, _ = asked_in_steps(100, save_seconds=40)
    assert not interrupts.too_late_for(19)
    assert interrupts.too_late_for(21)
    interrupts, _ = asked_in_steps(0.001)
    time.sleep(0.002)
    assert interrupts.out_of_time()
    assert interrupts.seconds_left() < 0
    interrupts = Interrupts()
    interrupts.begin_steps(0.0, lambda moment: None)
    assert not interrupts.too_late_for(1e9)


def test_rollouts_are_told_once_when_to_end_also_of_a_stop_from_before_the_first_step():
    before = time.time()
    interrupts, moments = asked_in_steps(100)
    interrupts.request(signal.SIGTERM)
    assert len(moments) == 1
    assert before + 74 < moments[0] < time.time() + 76
    interrupts, moments = Interrupts(), []
    interrupts.request(signal.SIGINT)
    interrupts.begin_steps(100, moments.append)
    assert len(moments) == 1
