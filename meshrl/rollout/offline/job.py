"""`meshrl generate`: the answers to a file of prompts, written row by row so that a killed run can go on.

A few lanes each give the rollout a group of rows and wait for all of it; while one group's last answers are still on
their way, the other lanes keep the engine full.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from rich.console import Console

from meshrl.config.chat_template import template_file_problems, template_name_problems
from meshrl.config.names import count
from meshrl.data.encoding import encode_prompt, is_chat
from meshrl.data.files import Row, read_rows
from meshrl.data.seen import Images
from meshrl.rollout.base import Rollout
from meshrl.rollout.command_line import named_values
from meshrl.rollout.offline.answers_file import check_output, write_output
from meshrl.rollout.offline.journal import Journal, Result
from meshrl.rollout.offline.progress import Progress
from meshrl.rollout.opened import EngineOptions, Opened, check_options, open_rollout
from meshrl.rollout.requests import Completion, Request, SamplingParams
from meshrl.rollout.seeds import sample_seeds
from meshrl.rollout.text import answer_text

LANES = 4
POLL_SECONDS = 0.5
TEMPLATE_OPTION = "--chat-template-arg"
# Beside training and validation: these samples are of neither.
OFFLINE = 2
Group = list[tuple[int, Request]]


@dataclass(frozen=True)
class Job:
    """What to generate, from where to where."""

    model: str
    prompts: Path
    out: Path
    params: SamplingParams
    prompt_key: str = "prompt"
    image_key: str | None = None
    seed: int = 0
    token_ids: bool = False
    restart: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_arguments(arguments: argparse.Namespace, params: SamplingParams) -> Job:
        """The job of a command line; a `ValueError` if the model's chat template does not know its variables."""
        template_kwargs = named_values(arguments.chat_template_arg, TEMPLATE_OPTION)
        problems = template_name_problems(template_kwargs, TEMPLATE_OPTION)
        if not problems and not arguments.trust_remote_code:
            problems = template_file_problems(template_kwargs, TEMPLATE_OPTION, arguments.model)
        if problems:
            raise ValueError("\n".join(problems))
        return Job(
            model=arguments.model,
            prompts=Path(arguments.prompts),
            out=Path(arguments.out),
            params=params,
            prompt_key=arguments.prompt_key,
            image_key=arguments.image_key,
            seed=arguments.seed,
            token_ids=arguments.token_ids,
            restart=arguments.restart,
            template_kwargs=template_kwargs,
        )

    def fingerprint(self, rows: Sequence[Row], options: EngineOptions) -> str:
        """Equal for jobs whose answers are equal: sizes of batches and of memory do not count."""
        engine = [options.engine, options.dtype, check_options(options).type, options.max_model_len, options.arguments]
        digest = hashlib.sha256()
        keys = [self.prompt_key] if self.image_key is None else [self.prompt_key, self.image_key]
        for row in rows:
            for key in keys:
                digest.update(json.dumps(row.get(key), default=repr).encode() + b"\n")
        asked = [str(Path(self.model).resolve()), asdict(self.params), self.seed, self.token_ids, digest.hexdigest()]
        asked.append(dict(self.template_kwargs))
        return hashlib.sha256(json.dumps([*asked, *engine], default=repr).encode()).hexdigest()


def generate(job: Job, options: EngineOptions, console: Console | None = None) -> str:
    """Answers every row of the job and returns a line about it. Rows that cannot be answered say why.

    A `ValueError` with that line, once it is all written, if none could be.
    """
    rows = _read(job)
    if job.seed < 0:
        raise ValueError(f"seed must be 0 or more, got {job.seed}")
    partial = job.out.with_name(job.out.name + ".partial")
    if job.restart:
        partial.unlink(missing_ok=True)
    with Journal(partial, job.fingerprint(rows, options)) as journal:
        earlier = len(journal.results)
        started = time.perf_counter()
        tokens = 0
        if earlier < len(rows):
            opened = open_rollout(job.model, options, job.image_key)
            try:
                with Progress(len(rows), earlier, console or Console(stderr=True)) as progress:
                    run = _Run(replace(job, params=_with_ends(job.params, opened)), rows, opened, options.max_num_seqs)
                    run.answer(journal, progress)
                    tokens = progress.tokens
            finally:
                opened.rollout.close()
        results = [journal.results[number] for number in range(len(rows))]
        write_output(job.out, job.prompts, rows, results)
        journal.remove()
    seconds = time.perf_counter() - started
    line = (
        f"wrote {count(len(rows), 'row')} to {job.out}: {earlier} were there already, {journal.failed} failed; "
        f"{count(tokens, 'token')} in {seconds:.1f} s{_first_error(results)}"
    )
    if journal.failed == len(rows):
        raise ValueError(line)
    return line


def _first_error(results: Sequence[Result]) -> str:
    errors = [result["error"] for result in results if result["error"] is not None]
    return f"; first error ({errors.count(errors[0])} of {len(errors)}): {errors[0]}" if errors else ""


def _read(job: Job) -> list[Row]:
    rows = read_rows([str(job.prompts)])
    if all(row.get(job.prompt_key) is None for row in rows):
        columns = ", ".join(map(str, rows[0])) or "nothing"
        raise ValueError(f"no row of '{job.prompts}' has a '{job.prompt_key}': name the column (it has: {columns})")
    check_output(job.out, job.prompts, rows, job.token_ids, job.restart)
    return rows


def _with_ends(params: SamplingParams, opened: Opened) -> SamplingParams:
    return replace(params, stop_token_ids=opened.stop_token_ids)


class _Run:
    """The rows of a job on their way through a rollout."""

    def __init__(self, job: Job, rows: Sequence[Row], opened: Opened, max_num_seqs: int):
        self.job, self.rows, self.opened = job, rows, opened
        self.rollout: Rollout = opened.rollout
        # So large that all lanes but one keep the engine full.
        self.group_size = max(1, max_num_seqs // (LANES - 1) // job.params.n)
        self._seeds = sample_seeds(job.seed, OFFLINE, 0, len(rows)).tolist()

    def answer(self, journal: Journal, progress: Progress) -> None:
        """Answers every row that the journal does not have."""
        groups = self._groups(journal)
        running: dict[Future[list[Completion]], Group] = {}
        with ThreadPoolExecutor(LANES, "lane") as lanes:
            try:
                while True:
                    while len(running) < LANES and (group := next(groups, None)) is not None:
                        running[lanes.submit(self.rollout.complete, [request for _, request in group])] = group
                    if not running:
                        return
                    done, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for future in done:
                        journal.add(self._results(running.pop(future), future.result()))
                    self._show(journal, progress)
            except BaseException:
                self.rollout.abort()  # or the lanes would go on to the end
                raise

    def _groups(self, journal: Journal) -> Iterator[Group]:
        """Rows still to be answered, as requests; those that cannot become one are entered as failed."""
        group: Group = []
        for number, row in enumerate(self.rows):
            if number in journal.results:
                continue
            try:
                prompt, images = self._encode(row, number)
            except (ValueError, TypeError, TemplateError) as error:
                journal.add([(number, self._result([], str(error)))])
                continue
            group.append((number, Request(f"row-{number}", prompt, self.job.params, self._seeds[number], images)))
            if len(group) == self.group_size:
                yield group
                group = []
        if group:
            yield group

    def _encode(self, row: Row, number: int) -> tuple[tuple[int, ...], Images]:
        prompt, images = row.get(self.job.prompt_key), self.opened.images
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return tuple(prompt), images.of(row, number) if images is not None else ()
        if images is not None:
            prompt = images.with_places(prompt)
        ids = encode_prompt(self.opened.tokenizer, prompt, number, None, self.job.template_kwargs)
        if images is None:
            return tuple(ids.tolist()), ()
        shown = images.of(row, number)
        for image in shown:
            images.reader.pixels(image)  # ahead of the rollout, which finds them kept
        return tuple(images.expanded(ids, shown, number).tolist()), shown

    def _results(self, group: Group, answers: Sequence[Completion]) -> Iterator[tuple[int, Result]]:
        n = self.job.params.n
        for place, (number, request) in enumerate(group):
            own = answers[place * n : (place + 1) * n]
            problem = next((answer.error for answer in own if answer.finish_reason == "error"), None)
            # A chat's answer is a text of its own; others go on with that of the prompt.
            before = () if is_chat(self.rows[number][self.job.prompt_key]) else request.prompt_token_ids
            yield number, self._result([] if problem is not None else own, problem, before)

    def _result(self, answers: Sequence[Completion], error: str | None, before: Sequence[int] = ()) -> Result:
        params, tokenizer = self.job.params, self.opened.tokenizer
        result: dict[str, Any] = {
            "responses": [answer_text(tokenizer, params, a.token_ids, a.finish_reason or "", before) for a in answers],
            "finish_reasons": [answer.finish_reason for answer in answers],
            "error": error,
        }
        if self.job.token_ids:
            result["response_token_ids"] = [answer.token_ids for answer in answers]
            result["response_log_probs"] = [answer.log_probs for answer in answers]
        return result

    def _show(self, journal: Journal, progress: Progress) -> None:
        progress.show(len(journal.results), journal.failed, int(self.rollout.stats().get("generated_tokens", 0)))
