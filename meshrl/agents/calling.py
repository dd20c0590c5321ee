"""Calling users' code without waiting for it for ever."""

from __future__ import annotations

import _thread
import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def call(function: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any) -> Any:
    """The result of a plain or `async` function; a `TimeoutError` after `timeout` seconds.

    A plain function runs in a daemon thread of its own: one that never returns is left behind and cannot keep the
    process from ending.
    """

    async def run() -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        value = await _in_thread(function, args, kwargs)
        return await value if inspect.isawaitable(value) else value

    return await asyncio.wait_for(run(), timeout)


async def _in_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)

    def work() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = function(*args, **kwargs)
        except StopIteration as error:  # a future does not take it
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(settle, value, failure)
            except RuntimeError:  # the loop closed in between: the answer came too late
                return

    # Not `threading.Thread`, whose start waits for the thread to run: here the event loop would wait.
    _thread.start_new_thread(work, ())
    return await done
