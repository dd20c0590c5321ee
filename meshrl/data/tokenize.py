"""Tokenization of prompts (texts or chat messages), in this process or in several processes.

The module does not import torch, so that the processes that tokenize start quickly.
"""

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


# The number of characters of a value that an error message shows.
SHOWN = 200


class RowError(ValueError):
    """The error for a row, given by its number. Code that knows the row's file converts it with `at`.

    Numbers count from 0. The message counts from 1, like the lines of a file.
    """

    def __init__(self, number: int, words: str):
        super().__init__(number, words)  # both arguments, because unpickling passes them to the constructor
        self.number, self.words = number, words

    def __str__(self) -> str:
        return f"row {self.number + 1}: {self.words}"

    def at(self, file: str, number: int) -> ValueError:
        """Convert to a `ValueError` that names the file and the row's number in it."""
        return ValueError(f"data file '{file}', row {number + 1}: {self.words}")


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Any,
    number: int,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Return the token ids `[tokens]` of a prompt: of a string, or of chat messages by the tokenizer's chat template.

    `template_kwargs` are variables of the template, such as `enable_thinking`. `number` is the row's number for errors.
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
    except (TypeError, TemplateError) as error:  # half of a surrogate pair, or an order of roles the template refuses
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
    """Tokenize several prompts as `encode_prompt` does, with texts in one call. `first` is the first row's number."""
    if prompts and all(isinstance(prompt, str) for prompt in prompts):
        try:
            found = [np.asarray(ids, dtype=np.int64) for ids in tokenizer(list(prompts))["input_ids"]]
        except TypeError:
            pass  # one of the texts cannot be tokenized: the loop below finds it
        else:
            for at, ids in enumerate(found):
                _check_tokens(ids, prompts[at], first + at)
            return found
    return [encode_prompt(tokenizer, prompt, first + at, tools, template_kwargs) for at, prompt in enumerate(prompts)]


def _check_tokens(ids: Sequence[int] | np.ndarray, prompt: Any, number: int) -> None:
    if len(ids) == 0:
        raise RowError(number, f"the prompt has no tokens: {shown(prompt)}")


def shown(value: Any) -> str:
    """Describe a value in an error message, cut to `SHOWN` characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def is_chat(messages: Any) -> bool:
    """Return whether a value is a list of at least one chat message (a dict with `role` and `content`)."""
    is_list = isinstance(messages, list) and len(messages) > 0
    return is_list and all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a conversation, rendered by the tokenizer's chat template."""
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


# Tokenization in several processes. They are plain subprocesses, in which the caller's main module does not run again.

# The time within which a killed process must end.
END_SECONDS = 30.0
PACKAGE_ROOT = str(Path(__file__).parents[2])
WORKER = f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from meshrl.data.tokenize import main; main()"
CHUNK = 256
# The time limit for one chunk, including imports on a busy machine.
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
    """Tokenize all prompts in several processes. The results and errors are those of `encode_prompt`, in order."""
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
    """A tokenizing process, the connection to it, and the start of the chunk in progress."""

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
        """Send the chunk at `start` to the process. Return False if `start` is None, as there are no more chunks."""
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
    """Run a tokenizing process: receive the tokenizer, then answer chunks of prompts until the connection closes."""
    connection = Connection(int(sys.argv[1]))
    try:
        tokenizer, tools, template_kwargs = connection.recv()
        while True:
            start, prompts = connection.recv()
            try:
                connection.send((True, encode_prompts(tokenizer, prompts, start, tools, template_kwargs)))
            except Exception as error:  # the caller raises it again, with its own type if it can be pickled
                connection.send((False, _portable(error)))
    except (EOFError, OSError):
        return  # the other end is done


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception class of the tokenizer that cannot be pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
