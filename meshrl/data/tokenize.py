"""From a prompt, text or chat messages, to token ids. Light: the processes that tokenize load this, and no torch."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


# How much of a prompt an error shows.
SHOWN = 200


class RowError(ValueError):
    """What is wrong with the row of a number; whoever knows its file tells it with `at`.

    Numbers count from 0, and the words from 1, as the lines of a file do.
    """

    def __init__(self, number: int, words: str):
        super().__init__(number, words)  # both, or it could not be pickled
        self.number, self.words = number, words

    def __str__(self) -> str:
        return f"row {self.number + 1}: {self.words}"

    def at(self, file: str, number: int) -> ValueError:
        """The same of a row of a file."""
        return ValueError(f"data file '{file}', row {number + 1}: {self.words}")


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Any,
    number: int,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Token ids of a prompt: a string as it is, or a list of chat messages through the tokenizer's chat template.

    `template_kwargs` are variables of the template, such as `enable_thinking`.
    """
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise RowError(
            number, f"the prompt must be a string or a list of messages with role and content, got {shown(prompt)}"
        )
    try:
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = render_chat(tokenizer, prompt, True, tools, template_kwargs)
    except (TypeError, TemplateError) as error:  # half of a surrogate pair, roles in an order that the template refuses
        raise RowError(number, f"the prompt cannot be tokenized ({error}): {shown(prompt)}") from error
    _check_tokens(ids, prompt, number)
    return np.asarray(ids, dtype=np.int64)


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[Any],
    first: int = 0,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[np.ndarray]:
    """`encode_prompt` of each; texts go to the tokenizer together. `first` is the number of the first of them."""
    if prompts and all(isinstance(prompt, str) for prompt in prompts):
        try:
            found = [np.asarray(ids, dtype=np.int64) for ids in tokenizer(list(prompts))["input_ids"]]
        except TypeError:
            pass  # one of them is no text: below it is told which
        else:
            for at, ids in enumerate(found):
                _check_tokens(ids, prompts[at], first + at)
            return found
    return [encode_prompt(tokenizer, prompt, first + at, tools, template_kwargs) for at, prompt in enumerate(prompts)]


def _check_tokens(ids: Sequence[int] | np.ndarray, prompt: Any, number: int) -> None:
    if len(ids) == 0:
        raise RowError(number, f"the prompt has no tokens: {shown(prompt)}")


def shown(value: Any) -> str:
    """A value for an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def is_chat(messages: Any) -> bool:
    """Whether this is a list of at least one chat message."""
    is_list = isinstance(messages, list) and len(messages) > 0
    return is_list and all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "the data are chat messages, but the tokenizer has no chat template: put one into its folder as "
            "chat_template.jinja, set model.tokenizer_path to a folder that has one, or write plain text"
        )
    rendered = tokenizer.apply_chat_template(
        messages,
        tools=tools or None,  # type: ignore[arg-type]
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
        **(template_kwargs or {}),
    )
    return list(rendered)


# Tokenizing many prompts in several processes: plain ones, in which the caller's main module does not run again.

# For a process that was killed to be gone.
END_SECONDS = 30.0
PACKAGE_ROOT = str(Path(__file__).parents[2])
WORKER = f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from meshrl.data.tokenize import main; main()"
CHUNK = 256
# For one chunk, imports on a busy machine included.
CHUNK_SECONDS = 600.0

OnProgress = Callable[[int, int], None]


def encode_in_processes(
    tokenizer: Tokenizer,
    prompts: Sequence[Any],
    tools: list[dict[str, Any]] | None,
    processes: int,
    on_progress: OnProgress | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[np.ndarray]:
    """Token ids of every prompt, in their order; what `encode_prompt` gives one by one, its errors included."""
    starts = list(range(0, len(prompts), CHUNK))
    found: dict[int, list[np.ndarray]] = {}
    with ExitStack() as stack:
        workers = [stack.enter_context(_Encoder()) for _ in range(min(processes, len(starts)))]
        for worker in workers:
            worker.send((tokenizer, tools, template_kwargs))
        waiting = iter(starts)
        busy = {worker.connection: worker for worker in workers if worker.give(prompts, next(waiting, None))}
        while busy:
            ready: list[Any] = wait(list(busy), CHUNK_SECONDS)
            if not ready:
                raise TimeoutError(f"{len(busy)} processes gave no chunk of {CHUNK} prompts within {CHUNK_SECONDS} s")
            for connection in ready:
                worker = busy.pop(connection)
                found[worker.start] = worker.answer()
                if on_progress is not None:
                    on_progress(sum(map(len, found.values())), len(prompts))
                if worker.give(prompts, next(waiting, None)):
                    busy[worker.connection] = worker
    return [ids for start in starts for ids in found[start]]


class _Encoder:
    """One process and the chunk it works on."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            seconds = max(1, int(CHUNK_SECONDS))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
        self.start = 0
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        finally:
            theirs.close()

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except BlockingIOError:
            raise TimeoutError(f"a tokenizing process has read nothing for {CHUNK_SECONDS:g} s") from None
        except OSError:
            raise self._ended() from None

    def give(self, prompts: Sequence[Any], start: int | None) -> bool:
        """Hands over the chunk at `start`, if there is one."""
        if start is None:
            return False
        self.start = start
        self.send((start, list(prompts[start : start + CHUNK])))
        return True

    def answer(self) -> list[np.ndarray]:
        try:
            done, value = self.connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if not done:
            raise value
        return value

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"a tokenizing process ended with exit code {self.process.wait(END_SECONDS)}")

    def __enter__(self) -> _Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait(END_SECONDS)


def main() -> None:
    """One process: the tokenizer first, then chunks of prompts, each answered in turn."""
    connection = Connection(int(sys.argv[1]))
    try:
        tokenizer, tools, template_kwargs = connection.recv()
        while True:
            start, prompts = connection.recv()
            try:
                connection.send((True, encode_prompts(tokenizer, prompts, start, tools, template_kwargs)))
            except Exception as error:  # said by the caller, in its own words where they can travel
                connection.send((False, _portable(error)))
    except (EOFError, OSError):
        return  # the other end is done


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception of the tokenizer's own making
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
