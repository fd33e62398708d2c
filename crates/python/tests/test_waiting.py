"""Threads, event loops, signals and processes."""

import asyncio
import os
import signal
import threading
import time

import moeflux
import pytest

FOX = [{"role": "user", "content": "Tell me a short story about a fox."}]


def endless(model):
    return {"max_tokens": 450, "logit_bias": dict.fromkeys(model.tokenizer.eos_ids, float("-inf")), "seed": 1}


def test_asynchronous_answers_are_the_same(model):
    expected = model.generate(FOX, seed=1, max_tokens=40)

    async def main():
        stream = model.stream(FOX, seed=1, max_tokens=40)
        text = ""
        async for piece in stream:
            text += piece.text
        whole = await model.stream(FOX, seed=1, max_tokens=40)
        many = await asyncio.gather(*(model.stream(FOX, seed=seed, max_tokens=10) for seed in range(12)))
        return text, whole, await stream, many

    text, whole, again, many = asyncio.run(main())
    assert text == whole.text == again.text == expected.text
    assert [answer.tokens for answer in many] == [model.generate(FOX, seed=seed, max_tokens=10).tokens for seed in range(12)]


def test_an_event_loop_goes_on_while_an_answer_is_made(model):
    async def main():
        async def whole():
            return await model.stream(FOX, **endless(model))

        task, ticks = asyncio.ensure_future(whole()), 0
        while not task.done():
            await asyncio.sleep(0)
            ticks += 1
        return ticks

    assert asyncio.run(main()) > 20


def test_cancelling_a_task_ends_the_answer(model):
    before = model.stats()["cancelled"]
    foxes = [{"role": "user", "content": 25 * FOX[0]["content"]}]

    async def main():
        async def whole():
            return await model.stream(FOX, **endless(model))

        task = asyncio.ensure_future(whole())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # A limit of time on one piece leaves the answer alone. A long question is not read when the limit is set.
        stream = model.stream(foxes, seed=1, max_tokens=20)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0)
        return await stream

    assert asyncio.run(main()).tokens == model.generate(foxes, seed=1, max_tokens=20).tokens
    wait_until(lambda: model.stats()["cancelled"] == before + 1 and model.stats()["running"] == 0)


def test_errors_reach_event_loops(model):
    async def main():
        with moeflux.open("demo", backend="cpu", context=512) as other:
            stream = other.stream(FOX, **endless(other))
            await anext(stream)
        with pytest.raises(moeflux.ClosedError, match="shutting down"):
            await stream
        with pytest.raises(moeflux.ClosedError):
            async for _ in stream:
                pass

    asyncio.run(main())


def test_other_threads_run_while_an_answer_is_made(model):
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counted[0]
        model.generate(FOX, **endless(model))
        during = counted[0] - before
        before = counted[0]
        model.logits(list(range(1, 400)))
        during_logits = counted[0] - before
    finally:
        done.set()
        thread.join()
    assert during > 100 and during_logits > 10


def test_threads_share_a_model(model):
    expected = [model.generate(FOX, seed=seed, max_tokens=20).tokens for seed in range(6)]
    got = [None] * 6

    def run(seed):
        got[seed] = model.generate(FOX, seed=seed, max_tokens=20).tokens

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert got == expected


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("wait", ["generate", "stream", "batch"])
def test_control_c_ends_the_answer(model, wait):
    cancelled = model.stats()["cancelled"]
    options = endless(model)

    def interrupt():
        wait_until(lambda: model.stats()["running"] > 0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    wait_until(lambda: model.stats()["running"] == 0)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        match wait:
            case "generate":
                model.generate(FOX, **options)
            case "stream":
                for _ in model.stream(FOX, **options):
                    pass
            case "batch":
                model.generate_batch([FOX] * 3, **options)
    thread.join()
    wait_until(lambda: model.stats()["running"] == 0)
    assert model.stats()["cancelled"] > cancelled
    assert model.generate(FOX, temperature=0, max_tokens=3).tokens


def test_control_c_between_chunks_leaves_a_session_as_it_was():
    with moeflux.open("demo", backend="cpu", context=512, chunk=2) as model:
        session = model.session()
        session.eval([1, 2, 3])
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                session.eval(list(range(1, 500)))
                session.truncate(3)
        timer.join()
        assert session.position in (3, 502)
        session.truncate(3)
        again = model.session()
        again.eval([1, 2, 3])
        assert (session.eval([4]) == again.eval([4])).all()


def test_closing(model):
    other = moeflux.open("demo", backend="cpu", context=128)
    stream, chat, session = other.stream(FOX), other.chat(), other.session()
    other.close()
    other.close()
    for use in (stream.answer, lambda: chat.ask("Hello!"), lambda: session.eval([1]), lambda: other.backend, other.session):
        with pytest.raises(moeflux.ClosedError, match="shutting down"):
            use()
    assert chat.messages == [] and "closed" in repr(other)
    # Answers keep their model.
    assert moeflux.open("demo", backend="cpu", context=128).stream(FOX, temperature=0, max_tokens=5).answer().tokens


def test_a_fork_says_that_it_has_no_model(model):
    child = os.fork()
    if child == 0:
        try:
            model.generate("x")
        except RuntimeError as error:
            os._exit(0 if "does not survive a fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
