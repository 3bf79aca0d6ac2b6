import os
import signal

import pytest

from verl_memopt.trainer.interrupts import Interrupts


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_says_how_the_run_will_end(number, code, caplog):
    with Interrupts() as interrupts:
        assert not interrupts.asked
        assert interrupts.exit_code is None
        os.kill(os.getpid(), number)
        assert interrupts.asked
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


def test_handlers_are_given_back_even_after_an_error():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before = handlers()
    with Interrupts():
        assert handlers() != before
    assert handlers() == before
    with pytest.raises(ZeroDivisionError), Interrupts():
        divmod(1, 0)
    assert handlers() == before
