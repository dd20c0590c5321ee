"""`meshrl generate`: completions for a file of prompts, saved row by row so that a killed run can be resumed.

Job, generate:  the task and its execution
Journal:        finished rows on disk, kept through a kill
Progress:       a progress bar or progress lines
write_output:   the output file

Rows go to the rollout in groups. A few lanes (threads) each submit one group and wait for all of it. While the last
completions of one group are still running, the other lanes keep the engine full.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from meshrl.config.keys import count
from meshrl.config.validate_data import template_file_problems, template_name_problems
from meshrl.data.images import Images
from meshrl.data.row_files import Row, read_rows
from meshrl.data.tokenize import encode_prompt, is_chat
from meshrl.files import naming, writing_whole
from meshrl.rollout.base import Rollout, sample_seeds
from meshrl.rollout.build import EngineOptions, Opened, check_options, open_rollout
from meshrl.rollout.requests import Completion, Request, SamplingParams
from meshrl.rollout.text import answer_text
from meshrl.serving.serve_command import named_values

if TYPE_CHECKING:
    import pyarrow as pa


LANES = 4
POLL_SECONDS = 0.5
TEMPLATE_OPTION = "--chat-template-arg"
# The `purpose` of `sample_seeds` for offline generation, distinct from those of training and validation.
OFFLINE = 2
Group = list[tuple[int, Request]]


@dataclass(frozen=True)
class Job:
    """A task of offline generation: the model, prompts file, output file and sampling parameters."""

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
        """Build the job of a command line; raise a ValueError if the chat template lacks one of the variables."""
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
        """Return a hash of everything that changes completions.

        Batch sizes and memory sizes are left out, because completions do not depend on them.
        """
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
    """Generate completions for every row of the job, write the output file and return a summary line.

    A row that fails gets its reason in the column `error`. If all rows fail, the output is written and then a
    ValueError with the summary line is raised.
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
    """One run of a job's rows through a rollout, in groups on several lanes."""

    def __init__(self, job: Job, rows: Sequence[Row], opened: Opened, max_num_seqs: int):
        self.job, self.rows, self.opened = job, rows, opened
        self.rollout: Rollout = opened.rollout
        # Large enough that all lanes but one keep the engine full.
        self.group_size = max(1, max_num_seqs // (LANES - 1) // job.params.n)
        self._seeds = sample_seeds(job.seed, OFFLINE, 0, len(rows)).tolist()

    def answer(self, journal: Journal, progress: Progress) -> None:
        """Generate completions for every row that is not in the journal, and add them to the journal."""
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
                self.rollout.abort()  # otherwise the executor would wait until all lanes have finished their groups
                raise

    def _groups(self, journal: Journal) -> Iterator[Group]:
        """Yield groups of requests for the rows that are not in the journal.

        Rows that cannot be encoded are added to the journal as failed.
        """
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
            images.reader.pixels(image)  # decoded here, and cached for the rollout
        return tuple(images.expanded(ids, shown, number).tolist()), shown

    def _results(self, group: Group, answers: Sequence[Completion]) -> Iterator[tuple[int, Result]]:
        n = self.job.params.n
        for place, (number, request) in enumerate(group):
            own = answers[place * n : (place + 1) * n]
            problem = next((answer.error for answer in own if answer.finish_reason == "error"), None)
            # The completion of a chat starts a new text. A plain completion continues the text of its prompt.
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


# Journal: the finished rows of an offline run, one line per row. It survives a kill, and the next run reads it.

Result = dict[str, Any]


class Journal:
    """A file of finished rows beside the output file.

    Its first line is the job's fingerprint, so results of different jobs are never mixed.
    """

    def __init__(self, path: Path, fingerprint: str):
        self.path = path
        self.results: dict[int, Result] = {}
        self.failed = 0
        good = self._read(fingerprint) if path.exists() and _has_results(path) else 0
        self._file = path.open("r+b" if path.exists() else "w+b")
        # A kill may have cut the last line short.
        self._file.truncate(good)
        self._file.seek(good)
        if not good:
            self._file.write(json.dumps({"fingerprint": fingerprint}).encode() + b"\n")
            self._flush()

    def _read(self, fingerprint: str) -> int:
        """Load all complete lines and return the byte offset of their end."""
        good = 0
        with self.path.open("rb") as lines:
            for line in lines:
                entry = _entry(line)
                if entry is None:
                    return good
                if good == 0 and entry.get("fingerprint") != fingerprint:
                    raise ValueError(
                        f"'{self.path}' is of a run with another model, engine, prompts or sampling: "
                        "finish that one, choose another --out, or forget it with --restart"
                    )
                if good:
                    self._keep(entry.pop("row"), entry)
                good += len(line)
        return good

    def add(self, results: Iterable[tuple[int, Result]]) -> None:
        """Append the results of some rows and flush them to disk."""
        for row, result in results:
            self._keep(row, result)
            self._file.write(json.dumps({"row": row, **result}).encode() + b"\n")
        self._flush()

    def _keep(self, row: int, result: Result) -> None:
        self.results[row] = result
        self.failed += result["error"] is not None

    def _flush(self) -> None:
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Close and delete the journal file, after the output is in place."""
        self._file.close()
        self.path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _has_results(path: Path) -> bool:
    """Return whether a journal file has lines after its fingerprint.

    A run that failed before its first completion, for example by a mistyped model, leaves only the fingerprint line.
    """
    with path.open("rb") as lines:
        return sum(1 for _, _ in zip(lines, range(2), strict=False)) > 1


def _entry(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and ("fingerprint" in entry or "row" in entry) else None


# Progress of an offline run: a bar on a terminal, otherwise a line every `LINE_SECONDS`.

LINE_SECONDS = 10.0


class Progress:
    """A display of finished rows, failed rows and tokens per second on a console."""

    def __init__(self, total: int, done: int, console: Console):
        self.total, self.console, self.tokens = total, console, 0
        self._bar = Bar(
            TextColumn("generate"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, note="")
        self._started = self._said = time.monotonic()

    def show(self, done: int, failed: int, tokens: int) -> None:
        """Show the current counts: update the bar, and without a terminal print a line from time to time."""
        self.tokens, now = tokens, time.monotonic()
        note = f"{tokens / max(now - self._started, 1e-9):,.0f} tok/s"
        if failed:
            note += f", {failed} failed"
        self._bar.update(self._task, completed=done, note=note)
        if not self.console.is_terminal and (now - self._said > LINE_SECONDS or done == self.total):
            self._said = now
            self.console.print(f"generate: {done} of {self.total} rows, {note}", highlight=False)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


# The output of an offline run: the columns of the prompts file, followed by the columns of the completions.

COLUMNS = ("responses", "finish_reasons", "error")
TOKEN_COLUMNS = ("response_token_ids", "response_log_probs")
SUFFIXES = (".parquet", ".jsonl")


def check_output(out: Path, prompts: Path, rows: Sequence[Row], token_ids: bool, restart: bool) -> None:
    """Raise, before anything is computed, if the output could not be written."""
    if out.suffix not in SUFFIXES:
        raise ValueError(f"--out '{out}' must end in {' or '.join(SUFFIXES)}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder '{out.parent}' to write '{out.name}' into")
    if out.resolve() == prompts.resolve():
        raise ValueError(f"--out '{out}' is the file of the prompts: choose another")
    if out.exists() and not restart:
        raise ValueError(f"'{out}' is there already: choose another --out, or write it anew with --restart")
    names = COLUMNS + (TOKEN_COLUMNS if token_ids else ())
    taken = next((name for name in names if any(name in row for row in rows)), None)
    if taken is not None:
        raise ValueError(f"the prompts have a column '{taken}', where an answer would be written: rename it")
    if out.suffix == ".parquet" and prompts.suffix != ".parquet":
        _table(prompts, rows)


def write_output(out: Path, prompts: Path, rows: Sequence[Row], results: Sequence[Result]) -> None:
    """Write all rows with their results to `out`, which appears only when it is complete."""
    with writing_whole(out) as aside:
        if out.suffix == ".parquet":
            _write_parquet(aside, prompts, rows, results)
            return
        # JSON may contain a lone surrogate, but UTF-8 may not. It is written as the escape that it came from.
        with aside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for row, result in zip(rows, results, strict=True):
                file.write(json.dumps(row | result, ensure_ascii=False, default=_as_text) + "\n")


def _as_text(value: Any) -> str:
    """Convert a value that JSON lacks into a string.

    Bytes, such as those of an image, become a data URL, so that they can be read again.
    """
    return (
        f"data:application/octet-stream;base64,{b64encode(value).decode()}" if isinstance(value, bytes) else str(value)
    )


def _write_parquet(aside: Path, prompts: Path, rows: Sequence[Row], results: Sequence[Result]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = _table(prompts, rows)
    types: dict[str, Any] = {
        "responses": pa.list_(pa.string()),
        "finish_reasons": pa.list_(pa.string()),
        "error": pa.string(),
        "response_token_ids": pa.list_(pa.list_(pa.int32())),
        "response_log_probs": pa.list_(pa.list_(pa.float32())),
    }
    for name in results[0]:
        column = pa.array([result[name] for result in results], types[name])
        table = table.append_column(name, column)
    pq.write_table(table, aside)


def _table(prompts: Path, rows: Sequence[Row]) -> pa.Table:
    """Return the prompts as a table; a parquet file keeps its column types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if prompts.suffix == ".parquet":
        return pq.read_table(prompts)
    # Not `from_pylist`, because it only keeps the columns of the first row.
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        pq.write_table(table.schema.empty_table(), pa.BufferOutputStream())  # fails for types that parquet lacks
        return table
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        raise ValueError(f"the rows of '{prompts}' do not fit into a parquet table, write .jsonl: {error}") from error
