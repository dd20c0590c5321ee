"""What runs of tiny configs build and do: each way of looking gives a flat table, by which two configs are compared.

`python key_walk.py FOLDER` walks all keys in a process of its own, which is patched and thrown away, and writes what it
found to FOLDER/answers.json.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
import torch.distributed as dist
import transformers
from key_graph import VOLATILE, graph
from key_rows import STARTS_PROCESSES, Row, all_keys, make_bases, overrides_for, row_of, write_files
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshrl.config.load as loading
import meshrl.engines.fsdp.fsdp_engine
import meshrl.trainer.launch as runs
import meshrl.trainer.run_state
import meshrl.trainer.time_accounting
from meshrl.config.batch_sizes import BatchUnits
from meshrl.config.keys import ConfigError, get_value
from meshrl.config.load import ROOTS, Loaded, load_config
from meshrl.config.validate import check_config, check_notes, unsupported
from meshrl.controller.dispatch import WorkerInfo
from meshrl.data.batch import DataProto
from meshrl.trainer.health_checks import GateError, Gates

Outcome = dict[str, str]


BEGUN = "begun "


@dataclass(frozen=True)
class Usual:
    """What a base gives, and what of it is noise."""

    outcome: Outcome
    noise: set[str]

    @functools.cached_property
    def begun(self) -> Outcome:
        """What had been built at the start."""
        return begun(self.outcome)


def begun(outcome: Outcome) -> Outcome:
    """What a run had built when it began to train; all of it, if it came no further."""
    return {name: value for name, value in outcome.items() if name.startswith(BEGUN)}


class EnoughError(Exception):
    """Ends a start whose arguments are known, or a run of which enough is seen."""


class Watched:
    """Calls of functions that end a way of a value: libraries', and some of ours that leave no trace."""

    def __init__(self) -> None:
        self.calls: Outcome = {}

    def note(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Writes down a call's plain arguments."""
        number = sum(key.startswith(f"call {name} ") for key in self.calls)
        told = graph({"args": [_named(value) for value in args], "kwargs": {n: _named(v) for n, v in kwargs.items()}})
        self.calls[f"call {name} {number}"] = json.dumps(told, sort_keys=True)

    @contextlib.contextmanager
    def on(self, owner: Any, name: str, ends: bool = False) -> Iterator[None]:
        """Notes calls of a function or class while it is watched; where it `ends` the start, it does not run."""
        real = getattr(owner, name)
        static = isinstance(owner.__dict__.get(name), classmethod) if isinstance(owner, type) else False

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.note(f"{getattr(owner, '__name__', owner)}.{name}", *args, **kwargs)
            if ends:
                raise EnoughError
            return real(*args, **kwargs)

        with patch.object(owner, name, staticmethod(watched) if static else watched):
            yield


def _named(value: Any) -> Any:
    """A model or a batch by its class, for all of it would be too much, and so an engine, which hangs on its worker."""
    kind = type(value)
    is_large = isinstance(value, torch.nn.Module | DataProto) or kind.__name__ in ("FSDPEngine", "MegatronEngine")
    return kind.__name__ if is_large else value


def ran(config: Any, root: str, out: Path, usual: Usual | None = None, anew: bool = True) -> Outcome:
    """A whole run in this process: what it had built at its start and at its end, its numbers, files and words.

    Where something else than in the `usual` run has been built at its start, it ends there.
    """
    found, text = Outcome(), io.StringIO()
    real = meshrl.trainer.run_state.Keeper.fit

    def fit(keeper: Any, loop: Any) -> None:
        built = graph({"keeper": keeper, "loop": loop}) | watched.calls
        found.update({f"{BEGUN}{name}": value for name, value in built.items()})
        if usual is not None and difference(usual.begun, found, usual.noise):
            raise EnoughError
        real(keeper, loop)
        found.update(graph({"keeper": keeper, "loop": loop}))

    if anew:
        shutil.rmtree(out, ignore_errors=True)
    with (
        patch.object(runs, "write_report", lambda path: "drawn"),
        patch.object(meshrl.trainer.run_state.Keeper, "fit", fit),
        watching() as watched,
    ):
        start = runs.train if root == "train" else runs.train_supervised
        try:
            start(config, console=Console(file=text, width=400))
        except EnoughError:
            return found
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:500]
    return found | watched.calls | _left_behind(out) | {f"said {line}": "" for line in text.getvalue().splitlines()}


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Watches what no object remembers."""
    import meshrl.agents.encoding
    import meshrl.config.validate_algorithm
    import meshrl.data.prompts
    import meshrl.engines.fsdp.sharding
    import meshrl.workers.actor
    import meshrl.workers.setup

    watched, megatron = Watched(), sys.modules.get("meshrl.engines.megatron.megatron_engine")
    with contextlib.ExitStack() as stack:
        if megatron is not None:
            stack.enter_context(watched.on(megatron.MegatronEngine, "to"))
        for owner, name in (
            (transformers.AutoConfig, "from_pretrained"),
            (transformers.AutoTokenizer, "from_pretrained"),
            (meshrl.data.prompts, "encode_in_processes"),
            (meshrl.engines.fsdp.fsdp_engine.FSDPEngine, "to"),
            (meshrl.engines.fsdp.fsdp_engine, "compile_layers"),
            (meshrl.engines.fsdp.fsdp_engine, "split_into_micro_batches"),
            (meshrl.engines.fsdp.sharding, "fully_shard"),
            (torch.distributed.fsdp.FSDPModule, "set_modules_to_forward_prefetch"),
            (torch.autograd.graph, "save_on_cpu"),
            (meshrl.workers.actor, "HybridEngine"),
            (meshrl.workers.setup, "init_process_group"),
            (meshrl.workers.setup, "prepare_device"),
            (meshrl.workers.setup, "import_code"),
            (meshrl.config.validate_algorithm, "import_code"),
            (runs, "surviving"),
            (meshrl.agents.encoding.TurnEncoder, "check"),
        ):
            stack.enter_context(watched.on(owner, name))
        yield watched


def _left_behind(out: Path) -> Outcome:
    """The metrics of each step, all files, and what is in those that two equal runs write alike."""
    found = Outcome()
    if (metrics := out / "metrics.jsonl").is_file():
        for line in metrics.read_text().splitlines():
            row = json.loads(line)
            found |= {f"metric {row.get('step')} {name}": repr(value) for name, value in row.items()}
    for file in sorted(path for path in out.rglob("*") if path.is_file()):
        found[f"file {file.relative_to(out)}"] = ""
        if file.suffix == ".safetensors" or file.parent.name in ("generations", "samples"):
            found[f"content {file.relative_to(out)}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def started(config: Any, root: str, out: Path) -> Outcome:
    """Which workers a run would start, where, and in what way; it ends there."""
    watched = Watched()
    start = runs.train if root == "train" else runs.train_supervised
    shutil.rmtree(out, ignore_errors=True)
    import meshrl.controller.ray

    with (
        watched.on(runs, "create_worker_group", ends=True),
        watched.on(meshrl.controller.ray, "init_ray", ends=True),
        contextlib.suppress(EnoughError),
    ):
        start(config, console=Console(quiet=True))
    return watched.calls


def built(config: Any, root: str, out: Path, only: str = "") -> Outcome:
    """The worker of rank 0 of a role (else of all) with its model, among ranks that are not there: a fake group."""
    found = Outcome()
    with watching() as watched, engines_not_installed(watched):
        for number, pool in enumerate(POOLS[root](config)):
            world = sum(pool.processes)
            with fake_world(world):
                info = WorkerInfo(rank=0, world_size=world, local_rank=0, local_world_size=world)
                for role, worker in pool.workers.items():
                    if only not in ("", role):
                        continue
                    try:
                        made = worker.build(info)
                        made.init_model()
                        found |= graph({f"{number}/{role}": made})
                        _use_megatron_engine(made, watched)
                    except EnoughError:
                        pass
                    except Exception as error:
                        found["error"] = f"{type(error).__name__}: {error}"[:500]
    return found | watched.calls


def _use_megatron_engine(worker: Any, watched: Watched) -> None:
    """Has Megatron's engine cut a batch into micro-batches, and rest."""
    engine = next((e for name in ("actor", "engine") if (e := getattr(worker, name, None)) is not None), None)
    if type(engine).__name__ != "MegatronEngine":
        return
    import meshrl.engines.megatron.megatron_engine as megatron

    ones = torch.ones(4, 6, dtype=torch.int64)
    batch = {"input_ids": ones, "attention_mask": ones, "response_mask": ones[:, :3]}
    meta = {"use_dynamic_bsz": True, "max_token_len": 12, "micro_batch_size": None}
    with watched.on(megatron, "split_for_pipeline"), patch.object(dist, "all_reduce", lambda *args, **kwargs: None):
        engine._prepare(DataProto.from_dict(batch, meta_info=meta))
    if engine.optim_config is not None:  # as if it were on a GPU
        with (
            patch.object(megatron, "move_weights", lambda *args: None),
            patch.object(megatron, "move_states", lambda *args: None),
            patch.object(megatron, "move_gradients", lambda *args: watched.note("move_gradients")),
            patch.object(engine, "device", torch.device("cuda")),
        ):
            engine.to("cpu")


def _ppo_pools(config: Any) -> list[Any]:
    return runs.ppo_pools(config, BatchUnits.from_config(config), 4)


def _supervised_pools(config: Any) -> list[Any]:
    role, worker, _, _ = runs.supervised_parts(config)
    made = runs.ClassWithInitArgs(worker, runs.with_absolute_files(config), 4)
    return [runs.Pool(config.trainer.processes, {role: made})]


POOLS = {"train": _ppo_pools, "sft": _supervised_pools, "prefer": _supervised_pools}


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A world whose other ranks answer at once, with whatever is there."""
    names = {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    if dist.is_initialized():
        dist.destroy_process_group()
    with patch.dict(os.environ, names):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            yield
        finally:
            from megatron.core import parallel_state

            if parallel_state.model_parallel_is_initialized():
                from meshrl.engines.megatron.parallel_state import leave_parallel_state

                leave_parallel_state()
            dist.destroy_process_group()


@contextlib.contextmanager
def engines_not_installed(watched: Watched) -> Iterator[None]:
    """Engines that are only asked for, with their arguments."""
    with contextlib.ExitStack() as stack:
        for place, name in (
            ("vllm.vllm_rollout", "VllmRollout"),
            ("vllm.server", "VllmServer"),
            ("sglang.sglang_engine", "SglangEngine"),
            ("sglang.sglang_engine", "SglangServer"),
        ):
            place = f"meshrl.rollout.{place}"
            module = sys.modules.setdefault(place, types.ModuleType(place))  # for the rest of this process
            setattr(module, name, None)
            stack.enter_context(watched.on(module, name, ends=True))
        yield


def difference(one: Outcome, other: Outcome, noise: set[str]) -> list[str]:
    """The places at which two outcomes differ."""
    names = {name for name, _ in one.items() ^ other.items()} - noise
    return sorted(name for name in names if not VOLATILE.search(name))


def starting(config: Any, root: str, out: Path) -> Outcome:
    """A run that ends where it would begin to train: what it had built."""
    return ran(config, root, out, Usual({}, set()))


def resumed(config: Any, root: str, out: Path) -> Outcome:
    """A run in a folder in which another has left a checkpoint."""
    first = copy.deepcopy(config)
    first.trainer.total_training_steps, first.trainer.resume_mode, first.trainer.resume_from_path = 1, "auto", None
    ran(first, root, out)
    return ran(config, root, out, anew=False)


def pooled(config: Any, root: str, out: Path) -> Outcome:
    """Which workers a run has, and on which devices."""
    return graph({"pools": POOLS[root](config)})


def read(config: Any, root: str, out: Path) -> Outcome:
    """What a run reads of its data: rows, their order, and the first batches."""
    model = config.actor_rollout_ref.model if root == "train" else config.model
    with watching() as watched:
        tokenizer = runs.run_tokenizer(model)
        if root != "train":
            return graph({"data": runs.run_rows(config, tokenizer)}) | watched.calls
        data, order, held_out = runs.run_prompts(config, tokenizer, None, Console(quiet=True))
        batches = [data.batch(numbers) for numbers in itertools.islice(order, 2)]
        rows = [batch.non_tensor_batch | dict(batch.batch) for batch in batches]
        rows = [{name: value.tolist() for name, value in batch.items()} for batch in rows]
        found = graph({"data": data, "order": order, "held_out": held_out}) | {"rows": repr(rows)}
    return found | watched.calls


def rewarded(config: Any, root: str, out: Path) -> Outcome:
    """How a run scores."""
    tokenizer = runs.run_tokenizer(config.actor_rollout_ref.model)
    return graph({"reward": runs.load_reward_manager(config, tokenizer, runs.GroupAsk())})


def assembled(config: Any, root: str, out: Path) -> Outcome:
    """The controller's parts without workers, and how it orders samples and asks rollouts to go on."""
    found = Outcome()

    def fit(keeper: Any, loop: Any) -> None:
        found.update(graph({"keeper": keeper, "loop": loop}))
        found["order"] = str(loop.balanced_order(np.array([9, 1, 8, 2, 7, 3, 6, 4]), 1, 4).tolist())
        loop.rollout, loop.meeting = MagicMock(), MagicMock()
        with contextlib.suppress(TypeError):
            loop.move_weights()
        found["asked"] = str([call[0] for call in loop.rollout.mock_calls])
        for step in (1, 2) if loop.profiler else ():
            loop.profiler.begin(step)
        found["profiled"] = str([str(call) for call in workers.execute_rank.mock_calls])

    @contextlib.contextmanager
    def no_workers(pools: Any, *others: Any) -> Iterator[dict[str, Any]]:
        yield {role: workers for pool in pools for role in pool.workers}

    workers = MagicMock(world_size=2)
    shutil.rmtree(out, ignore_errors=True)
    with (
        patch.object(runs, "worker_groups", no_workers),
        patch.object(runs, "bookkeeping", lambda *args: contextlib.nullcontext()),
        patch.object(runs, "write_report", lambda path: "drawn"),
        patch.object(meshrl.trainer.run_state.Keeper, "fit", fit),
    ):
        runs.train(config, console=Console(quiet=True))
    return found


# What a step may have measured: each gate has something to say.
STEPS: list[dict[str, float]] = [
    {"actor/ppo_kl_before": 0.5, "training/rollout_log_prob_diff_mean": 0.5, "actor/entropy": 1.0, "odd": 2.0},
    *({"training/rollout_log_prob_diff_mean": 0.5, "actor/entropy": 0.01, "training/zero_advantage_share": 1.0,
       "critic/score/mean": 0.0, "actor/ppo_kl_before": 0.0, "odd": 2.0} for _ in range(8)),
]  # fmt: skip


def gated(config: Any, root: str, out: Path) -> Outcome:
    """What the gates say to steps in which everything is off."""
    said: list[str] = []
    gates = Gates(config.trainer.gates, out, say=said.append)
    batch = DataProto.from_dict({"response_mask": torch.ones(1, 2), "advantages": torch.tensor([[1.0, float("nan")]])})
    with contextlib.suppress(GateError):
        gates.check_batch(batch, 0)
        said.append("trained")
    for step, metrics in enumerate(STEPS, 1):
        said.append(json.dumps(gates.after_step(step, metrics)))
        try:
            gates.raise_if_stopped(step, metrics)
        except GateError as error:
            said.append(str(error))
    return {f"said {number}": line for number, line in enumerate(said)}


Look = Callable[..., Outcome]
LOOKS: dict[str, Look] = {
    look.__name__: look for look in (ran, starting, started, built, resumed, pooled, read, rewarded, assembled, gated)
} | {f"built {role}": partial(built, only=role) for role in ("ref", "critic", "reward_model", "judge")}


@dataclass
class Answer:
    """What became of a key's other value in a base: refused, noted, or changes (`places`, of which a few are named)."""

    base: str
    value: str
    refused: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    places: int = 0
    examples: list[str] = field(default_factory=list)
    error: str | None = None


class Walker:
    """Looks at configs of some bases; at each base itself twice, for what differs between equal runs is noise."""

    def __init__(self, folder: Path):
        self.folder, self.bases = folder, make_bases(folder)
        self._usual: dict[str, Usual] = {}
        self._configs = {base: self.load(base).config for base in self.bases}

    def load(self, base: str, *overrides: str) -> Loaded[Any]:
        root, _, own = self.bases[base]
        return load_config(None, [*own, *overrides], ROOTS[root])

    def look(self, base: str, *overrides: str) -> Outcome:
        root, way, _ = self.bases[base]
        return LOOKS[way](self.load(base, *overrides).config, root, self.folder / "run")

    def usual(self, base: str) -> Usual:
        """What a base gives, and what of it is noise."""
        if base not in self._usual:
            if problems := check_config(self.load(base).config):
                raise ValueError(f"the base '{base}' is refused: {problems}")
            first = self.look(base)
            if "error" in first:
                raise ValueError(f"the base '{base}' fails: {first['error']}")
            again = self.look(base) if self.bases[base][1] in ("ran", "starting", "resumed") else first
            self._usual[base] = Usual(first, set(difference(first, again, set())))
        return self._usual[base]

    def control(self, root: str) -> list[str]:
        """What is found in another run of a command's plain config: nothing, to its end."""
        usual = self.usual(root)
        return difference(usual.outcome, self.look(root), usual.noise)

    def answer(self, root: str, name: str, row: Row, base: str) -> Answer:
        """What a key's other value changes in a base."""
        config = self._configs[base]
        overrides = overrides_for(root, config, row, name, self.folder)
        answer = Answer(base, overrides[0].partition("=")[2])
        try:
            loaded = self.load(base, *overrides)
        except ConfigError as error:
            return replace(answer, refused=error.problems)
        if base == root and row.base != base and get_value(loaded.config, name) == get_value(config, name):
            return self.answer(root, name, Row(name, base), base)  # the row's value is what this base has
        answer.refused = unsupported(loaded.config) + check_config(loaded.config)
        if answer.refused:
            return answer
        notes = [*check_notes(loaded.config, loaded.sources), *loaded.notes]
        answer.noted = [note for note in notes if note.startswith(f"{name} ")]
        if answer.noted:
            return answer
        _, way, _ = self.bases[base]
        try:
            usual = self.usual(base)
            look = partial(ran, usual=usual) if way == "ran" else LOOKS[way]
            found = look(loaded.config, root, self.folder / "run")
        except Exception as error:
            return replace(answer, error="".join(traceback.format_exception(error))[-3000:])
        ended = way == "ran" and all(name.startswith(BEGUN) for name in found)
        places = difference(usual.begun if ended else usual.outcome, found, usual.noise)
        return replace(answer, places=len(places), examples=places[:3], error=found.get("error"))


def walk(folder: Path) -> dict[str, Any]:
    """Every key by its row, and in the plain run of its command; keys of Megatron last, which patches this process."""
    walker = Walker(folder)
    rows = {(root, name): row_of(root, name) for root, name in all_keys()}
    by_row: dict[str, Answer] = {}
    in_plain: dict[str, Answer] = {}
    prepare_checkpoints(walker)
    for megatron in (False, True):
        if megatron:
            use_megatron()
        for (root, name), row in rows.items():
            if (
                walker.bases[row.base][1].startswith("built") and "megatron" in " ".join(walker.bases[row.base][2])
            ) == megatron:
                by_row[f"{root}:{name}"] = walker.answer(root, name, row, row.base)
            if not megatron and row.base != root and not STARTS_PROCESSES.fullmatch(name):
                in_plain[f"{root}:{name}"] = walker.answer(root, name, row, root)
    controls = {root: walker.control(root) for root in ROOTS}
    with patch.object(runs, "StallWatch", deaf(runs.StallWatch)):
        walker = Walker(folder)
        deafened = walker.answer("sft", "trainer.stall_timeout", row_of("sft", "trainer.stall_timeout"), "sft")
    return {
        "by_row": {key: asdict(answer) for key, answer in by_row.items()},
        "in_plain": {key: asdict(answer) for key, answer in in_plain.items()},
        "controls": controls,
        "deafened": asdict(deafened),
    }


def deaf(kind: Callable[..., Any]) -> Callable[..., Any]:
    """A reader that does not hear its first argument."""
    return lambda first, *args, **kwargs: kind(1800.0, *args, **kwargs)


def prepare_checkpoints(walker: Walker) -> None:
    """Checkpoints that runs of each command may go on from."""
    for root, base in (("train", "saving"), ("sft", "sft saving"), ("prefer", "prefer saving")):
        walker.usual(base)
        kept = walker.folder / "kept" / root / "global_step_1"
        shutil.copytree(walker.folder / "run" / "checkpoints" / "global_step_1", kept)


def reading_once(read_folder: Callable[..., Any]) -> Callable[..., Any]:
    """The same files are read again and again: a copy of what they gave the first time takes a tenth of the time."""
    known: dict[str, Any] = {}

    def read_once(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, sorted(kwargs.items())))
        if key not in known:
            known[key] = read_folder(*args, **kwargs)
        return copy.deepcopy(known[key])

    return read_once


def use_megatron() -> None:
    """Has Megatron-Core build its models on a CPU, with process groups that are not there."""

    sys.path.insert(0, str(Path(__file__).parents[1] / "special_distributed"))
    import megatron_cpu

    import meshrl.engines.megatron.megatron_engine

    del meshrl
    megatron_cpu.install()
    make_group = dist.new_group
    dist.new_group = lambda *args, backend=None, **kwargs: make_group(*args, **kwargs)


def make_cheaper() -> None:
    """Leaves out what costs time and changes nothing that is looked at."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the libraries' own objects need not be gone through again and again
    gc.set_threshold(20_000, 20, 50)
    os.fsync = lambda file: None  # no file has to outlive the machine
    torch.compile = lambda function, **options: function  # that layers are compiled, and how, is seen from our own call
    meshrl.trainer.time_accounting.seconds_of_a_block = lambda: 0.0  # what booking takes here, measured in each run
    loading.parse_override = functools.cache(loading.parse_override)
    for kind in (transformers.AutoConfig, transformers.AutoTokenizer):
        kind.from_pretrained = reading_once(kind.from_pretrained)


if __name__ == "__main__":
    make_cheaper()
    place = Path(sys.argv[1]).resolve()
    os.chdir(place)
    write_files(place)
    (place / "answers.json").write_text(json.dumps(walk(place), indent=1))
