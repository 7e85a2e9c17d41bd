"""Turns: order of arrival, the same thread again, and a turn that ends whatever happens in it."""

import threading
import time

import pytest

from specmm.core.turns import Turns, in_its_turn, turns_of


def until(happened):
    """Wait for what another thread is about to do."""
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end, "a thread does not get on"
        time.sleep(0.001)


def queue_up(turns, works):
    """Threads that wait for ``turns`` in the order of ``works``, which they then do."""

    def wait(work):
        with turns.take():
            work()

    threads = []
    for work in works:
        before = turns.waiting
        threads.append(threading.Thread(target=wait, args=(work,)))
        threads[-1].start()
        until(lambda before=before: turns.waiting > before)
    return threads


def test_waiting_threads_are_served_in_the_order_of_their_arrival():
    turns, served = Turns(), []
    for _ in range(20):
        with turns.take():
            threads = queue_up(turns, [lambda i=i: served.append(i) for i in range(3)])
            assert not served
        for thread in threads:
            thread.join()
        assert served == [0, 1, 2] and not turns.waiting
        served.clear()


def test_who_gives_a_turn_back_and_wants_another_stands_after_those_who_wait():
    turns, served = Turns(), []
    with turns.take():
        (thread,) = queue_up(turns, [lambda: served.append("other")])
    with turns.take():
        served.append("again")
    thread.join()
    assert served == ["other", "again"]


def test_the_same_thread_may_take_its_turn_again_and_keeps_it():
    turns, served = Turns(), []
    with turns.take():
        with turns.take():
            (thread,) = queue_up(turns, [lambda: served.append("other")])
        time.sleep(0.02)
        assert not served
    thread.join()
    assert served == ["other"]


def test_what_raises_gives_its_turn_back():
    turns, served = Turns(), []
    with pytest.raises(KeyError), turns.take():
        (thread,) = queue_up(turns, [lambda: served.append("other")])
        raise KeyError
    thread.join(20)
    assert served == ["other"]


def test_an_interrupted_wait_leaves_the_queue(monkeypatch):
    turns, served = Turns(), []
    with turns.take():
        (first,) = queue_up(turns, [lambda: served.append("first")])

        def interrupted():
            with monkeypatch.context() as patch:
                patch.setattr(threading.Event, "wait", stop)
                with pytest.raises(KeyboardInterrupt), turns.take():
                    served.append("never")

        def stop(_):
            raise KeyboardInterrupt

        thread = threading.Thread(target=interrupted)
        thread.start()
        thread.join(20)
        assert turns.waiting == 1
        (last,) = queue_up(turns, [lambda: served.append("last")])
    first.join(20)
    last.join(20)
    assert served == ["first", "last"]


def test_items_are_made_in_turns_and_handed_out_between_them():
    turns, threads, served = Turns(), [], []

    def items():
        for i in range(3):
            threads.extend(queue_up(turns, [lambda i=i: served.append(i)]))
            yield i

    for i in turns.each(items()):
        until(lambda i=i: served == list(range(i + 1)))  # while the iterator waits for us
    assert len(threads) == 3
    abandoned = turns.each(items())
    next(abandoned)
    with turns.take():
        del abandoned


def test_turns_are_those_of_a_model():
    class Model:
        pass

    model, other = Model(), Model()
    assert turns_of(model) is turns_of(model) is not turns_of(other)

    @in_its_turn(lambda model: model)
    def run(_, much):
        assert turns_of(model)._depth == 1
        return much

    assert run(model, 3) == 3 and run.__name__ == "run"
