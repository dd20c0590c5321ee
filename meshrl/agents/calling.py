"""Calling users' code without waiting for it for ever."""

from __future__ import annotations

import _thread
import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def call(
    function: Callable[..., Any], *args: Any, timeout: float, late: Callable[[Any], None] | None = None
) -> Any:
    """The result of a plain or `async` function; a `TimeoutError` after `timeout` seconds, an `Exception` else.

    A plain function runs in a daemon thread of its own: one that never returns is left behind and cannot keep the
    process from ending. What one returns after its time is given to `late`, in a thread.
    """
    return await asyncio.wait_for(beside(function, *args, late=late), timeout)


async def beside(function: Callable[..., Any], *args: Any, late: Callable[[Any], None] | None = None) -> Any:
    """The result of a plain or `async` function that does not hold up the event loop, without a limit of time."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        value = await _in_thread(function, args, late)
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:  # it would end the event loop, and all other samples
        raise RuntimeError(f"SystemExit: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError(f"CancelledError: {error}") from error  # its own, not ours


async def _in_thread(function: Callable[..., Any], args: tuple[Any, ...], late: Callable[[Any], None] | None) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if done.done():  # nobody waits any more
            if late is not None and error is None:
                _thread.start_new_thread(late, (value,))
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)

    def work() -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = function(*args)
        except StopIteration as error:  # a future does not take it
            failure = RuntimeError(f"StopIteration: {error}")
        except Exception as error:
            failure = error
        except BaseException as error:  # such as `sys.exit()`, which is not meant for our event loop
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:  # the loop is closed: the answer came too late
            if late is not None and failure is None:
                late(value)

    # Not `threading.Thread`, whose start waits for the thread to run: here the event loop would wait.
    _thread.start_new_thread(work, ())
    return await done
