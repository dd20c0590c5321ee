"""Runs of `meshrl prefer`: their numbers against plain transformers, every layout, what is learned and what for."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron_workers import OnCpu
from rich.console import Console
from safetensors.torch import load_file
from test_layouts import compare
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from meshrl.config import PreferenceConfig, load_config
from meshrl.config.validate import ensure_runnable
from meshrl.trainer.launch import train_supervised
from meshrl.workers.supervised_worker import PreferenceWorker

sys.path.append(str(Path(__file__).parents[1] / "special_distributed"))

STEPS, BETA, GAMMA = 2, 0.3, 0.4


def pair(digits, rng):
    """The sorted digits, or few of them, so that lengths differ, against two exchanged."""
    good = sorted(digits)[: rng.randint(2, 6)]
    bad = good.copy()
    at, other = rng.sample(range(len(good)), 2)
    bad[at], bad[other] = bad[other], bad[at]
    return {"prompt": f"{digits}>", "chosen": "".join(good), "rejected": "".join(bad) + "0" * rng.randint(0, 1)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """960 pairs, 64 held-out ones, and the same with the answers exchanged."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    rows = [pair("".join(str(rng.randint(0, 9)) for _ in range(6)), rng) for _ in range(1280)]
    rows = [row for row in rows if row["chosen"] != row["rejected"]]
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    made = {}
    for name, part in (("train", rows[:960]), ("val", rows[960:1024]), ("turned", turned[:960])):
        assert len(part) in (960, 64)
        made[name] = folder / f"{name}.jsonl"
        made[name].write_text("".join(json.dumps(row) + "\n" for row in part))
    return made


def runs_of(recipe, task, file, *given):
    """How to start a short run of a recipe on the rows of a file: `start(out, *overrides)`."""

    def start(out, *overrides):
        words = [
            f"data.train_files=[{file}]", "data.shuffle=false", "data.train_batch_size=12", "data.max_length=16",
            f"model.path={task.model}", "model.enable_gradient_checkpointing=false",
            "engine.fsdp_config.mixed_precision.param_dtype=fp32", "optim.lr=1e-4", f"loss.beta={BETA}",
            "optim.lr_warmup_steps_ratio=0", "optim.lr_scheduler_type=constant",
            "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[file]",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.default_local_dir={out}", *given, *overrides,
        ]  # fmt: skip
        config = load_config(recipe, words, PreferenceConfig).config
        ensure_runnable(config)
        path = train_supervised(config, console=Console(quiet=True))
        metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        weights = load_file(path / "model" / "model.safetensors")
        return SimpleNamespace(path=path, metrics=metrics, weights=weights)

    return start


@pytest.fixture(scope="module")
def run(task, files):
    return runs_of("dpo", task, files["train"], "data.max_token_len_per_gpu=100")  # several micro-batches


@pytest.fixture(scope="module")
def reference(task, tmp_path_factory):
    return shaken_model(task, tmp_path_factory.mktemp("reference") / "model")


def shaken_model(task, folder):
    """A model that is somewhat another than the task's, and less sure of itself."""
    model = AutoModelForCausalLM.from_pretrained(task.model)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.02)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.model).save_pretrained(folder)
    return folder


def answers_of(task, rows):
    """Of each row the ids of both sequences, and where their answers begin."""
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        told = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in ("chosen", "rejected"))
        yield [torch.tensor([*prompt, *ids, tokenizer.eos_token_id]) for ids in told], len(prompt)


def log_prob(model, ids, start):
    """Of what comes after the prompt: the sum and the number of tokens."""
    found = F.log_softmax(model(ids[None]).logits[0, :-1].float(), -1).gather(1, ids[1:, None])[start - 1 :]
    return found.sum(), len(found)


def side_by_side(model, asked):
    """What a model says of both sequences of each pair, all of them in one batch: no token sees what follows it."""
    with torch.no_grad():
        return model(pad_sequence([ids for both, _ in asked for ids in both], batch_first=True)).logits


def frozen_log_probs(folder, asked):
    """The log-probs of both answers of each pair."""
    logits = side_by_side(AutoModelForCausalLM.from_pretrained(folder), asked)
    places = [(ids, start) for both, start in asked for ids in both]
    sums = [
        F.log_softmax(row[start - 1 : len(ids) - 1].float(), -1).gather(1, ids[start:, None]).sum()
        for row, (ids, start) in zip(logits, places, strict=True)
    ]
    return torch.stack(sums).view(-1, 2)


@pytest.fixture(scope="module")
def asked(task, files):
    """The pairs of some steps."""
    rows = [json.loads(line) for line in files["train"].read_text().splitlines()]
    return list(answers_of(task, rows[: 12 * STEPS]))


@pytest.fixture(scope="module")
def expected_by_reference(reference, asked):
    return frozen_log_probs(reference, asked)


def steps_by_hand(task, asked, name, frozen, **more):
    """The metrics of some steps with plain transformers, one sequence of the policy at a time."""
    if name == "reward":
        model = AutoModelForTokenClassification.from_pretrained(task.model, num_labels=1)
        torch.nn.init.zeros_(model.score.weight)
        torch.nn.init.zeros_(model.score.bias)
    else:
        model = AutoModelForCausalLM.from_pretrained(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    found = []
    for step in range(len(asked) // 12):
        leads, losses, likelihood, tokens = [], [], 0.0, 0
        own = slice(12 * step, 12 * step + 12)
        for (both, start), (c, r) in zip(asked[own], frozen[own], strict=True):
            if name == "reward":
                chosen, rejected = (model(ids[None]).logits[0, -1, 0] for ids in both)
            else:
                (chosen, n), (rejected, m) = (log_prob(model, ids, start) for ids in both)
                likelihood, tokens = likelihood - chosen, tokens + n
                if name not in ("simpo", "orpo"):
                    chosen, rejected = chosen - c, rejected - r
                if name in ("simpo", "ipo", "orpo"):
                    chosen, rejected = chosen / n, rejected / m
                if name == "orpo":
                    chosen, rejected = (x - torch.log1p(-x.exp()) for x in (chosen, rejected))
            lead = chosen - rejected if name == "reward" else BETA * (chosen - rejected)
            wrong = more.get("label_smoothing", 0.0)
            sure = -F.logsigmoid(lead - (GAMMA if name == "simpo" else 0.0))
            losses.append(
                {
                    "ipo": (chosen - rejected - 0.5 / BETA) ** 2,
                    "hinge": F.relu(1 - lead),
                    "orpo": -BETA * F.logsigmoid(chosen - rejected),
                }.get(name, (1 - wrong) * sure + wrong * -F.logsigmoid(-lead))
            )
            leads.append(lead.detach())
        loss = torch.stack(losses).mean()
        if weight := more.get("sft_weight", float(name == "orpo")):
            loss = loss + weight * likelihood / tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        leads = torch.stack(leads)
        found.append(
            {"train/loss": loss, "train/grad_norm": norm, "train/margin": leads.mean(),
             "train/accuracy": (leads > 0).float().mean()}
        )  # fmt: skip
    return [{name: float(value.detach()) for name, value in row.items()} for row in found]


CASES = {
    "dpo": {},
    "dpo-smooth": {"label_smoothing": 0.1, "sft_weight": 0.5},
    "ipo": {},
    "hinge": {},
    "simpo": {},
    "orpo": {},
    "reward": {},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_plain_transformers(task, run, reference, asked, expected_by_reference, tmp_path, case):
    name = case.partition("-")[0]
    overrides = [f"loss.name={name}", *(f"loss.{key}={value}" for key, value in CASES[case].items())]
    if name in ("dpo", "ipo", "hinge"):
        overrides.append(f"reference.path={reference}")
    if name == "simpo":
        overrides.append(f"loss.simpo_gamma={GAMMA}")
    if name == "reward":
        overrides.append("loss.beta=0.1")
    ours = run(tmp_path / "run", *overrides).metrics
    expected = steps_by_hand(task, asked, name, expected_by_reference, **CASES[case])
    for row, wanted in zip(ours, expected, strict=True):
        assert {key: row[key] for key in wanted} == pytest.approx(wanted, rel=2e-4, abs=2e-5)
    if case == "dpo":  # the control: against itself as the reference it is another run
        other = steps_by_hand(task, asked[:12], name, frozen_log_probs(task.model, asked[:12]))
        assert abs(other[0]["train/loss"] - ours[0]["train/loss"]) > 0.01


LAYOUTS = {
    "two": ("trainer.n_gpus_per_node=2",),
    "sp2": ("trainer.n_gpus_per_node=2", "engine.ulysses_sequence_parallel_size=2"),
    "cp2": ("trainer.n_gpus_per_node=2", "engine.context_parallel_size=2"),
    "by-size": ("data.micro_batch_size_per_gpu=3",),
    "offload": ("trainer.n_gpus_per_node=2", "reference.param_offload=true", "engine.fsdp_config.offload_policy=true"),
    "padded": ("model.use_remove_padding=false",),
}


@pytest.fixture(scope="module")
def one_process(run, reference, tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), f"reference.path={reference}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_run(run, reference, one_process, tmp_path, layout):
    compare(one_process, run(tmp_path / "run", f"reference.path={reference}", *LAYOUTS[layout]), 1e-5)


def test_the_comparison_can_fail(run, reference, one_process, tmp_path):
    other = run(tmp_path / "run", f"reference.path={reference}", "loss.beta=0.29")
    with pytest.raises(AssertionError):
        compare(one_process, other, 1e-5)


class WorkerOnCpu(OnCpu, PreferenceWorker):
    pass


@pytest.mark.parametrize("loss", ["dpo", "reward"])
def test_megatron_gives_the_same_run(run, reference, one_process, tmp_path, monkeypatch, loss):
    """Two tensor-parallel ranks of two stages, the larger share of the micro-batches in the middle of the pipeline."""
    pytest.importorskip("megatron.core")
    if loss == "dpo":
        more, expected = (f"reference.path={reference}",), one_process
    else:
        more = ("loss.name=reward", "loss.beta=0.1")
        expected = run(tmp_path / "one", *more)
    monkeypatch.setattr("meshrl.trainer.launch.PreferenceWorker", WorkerOnCpu)
    megatron = (
        "engine.strategy=megatron", "engine.megatron.dtype=fp32", "trainer.n_gpus_per_node=4",
        "engine.fsdp_config.mixed_precision.param_dtype=bf16",
        "engine.megatron.tensor_model_parallel_size=2", "engine.megatron.pipeline_model_parallel_size=2",
    )  # fmt: skip
    compare(expected, run(tmp_path / "run", *more, *megatron), 1e-4)


def test_the_base_of_adapters_is_the_reference(task, run, tmp_path):
    """Without a second model, and equal to one with the same weights."""
    lora = ("model.lora_rank=4", "optim.lr=1e-3")
    alone = run(tmp_path / "alone", *lora)
    assert alone.metrics[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)  # log 2: as yet there is no difference
    assert alone.metrics[-1]["train/margin"] > 0
    compare(alone, run(tmp_path / "beside", *lora, f"reference.path={task.model}"), 1e-5)


def test_it_goes_on_to_the_bit(run, tmp_path):
    def steps(count):
        return (f"trainer.total_training_steps={count}", "trainer.save_freq=2", "data.shuffle=true")

    whole = run(tmp_path / "whole", *steps(4))
    run(tmp_path / "parts", *steps(2))
    resumed = run(tmp_path / "parts", *steps(4))
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3, 4]
    assert all(weight.equal(whole.weights[name]) for name, weight in resumed.weights.items())


def held_out(task, files):
    return list(answers_of(task, [json.loads(line) for line in files["val"].read_text().splitlines()]))


def held_out_leads(task, files, folder):
    """By how much plain transformers find the better answer the more likely one."""
    chosen, rejected = frozen_log_probs(folder, held_out(task, files)).unbind(1)
    return chosen - rejected


LEARNING = (
    "data.train_batch_size=32",
    "trainer.total_training_steps=15",
    "optim.lr=6e-4",
    "data.max_token_len_per_gpu=8192",
)


def test_it_learns_what_is_preferred_whichever_that_is(task, files, run, tmp_path):
    validated = (f"data.val_files=[{files['val']}]", "trainer.test_freq=15")
    learned = run(tmp_path / "learned", *LEARNING, *validated)
    row = learned.metrics[-1]
    assert row["val/accuracy"] > 0.8
    assert row["val/margin"] > 0.2
    before, after = (held_out_leads(task, files, folder) for folder in (task.model, learned.path / "model"))
    assert row["val/margin"] == pytest.approx(float((after - before).mean() * BETA), rel=1e-3)
    # The control: the worse answers are learned just as well.
    turned = run(tmp_path / "turned", *LEARNING, *validated, f"data.train_files=[{files['turned']}]")
    assert turned.metrics[-1]["val/accuracy"] < 0.2
    assert float(held_out_leads(task, files, turned.path / "model").mean()) < float(before.mean()) < float(after.mean())


def test_a_reward_model_is_learned_and_trains_a_policy_alone(task, files, run, tmp_path):
    options = ("loss.name=reward", "loss.beta=0.1", f"data.val_files=[{files['val']}]", "trainer.test_freq=15")
    scorer = run(tmp_path / "scorer", *LEARNING, "data.train_batch_size=64", "optim.lr=1e-3", *options)
    assert scorer.metrics[-1]["val/accuracy"] > 0.8
    # It is a plain token classifier, whose number at the last token is what was validated.
    model = AutoModelForTokenClassification.from_pretrained(scorer.path / "model")
    pairs = held_out(task, files)
    last = torch.tensor([[len(ids) - 1 for ids in both] for both, _ in pairs])
    chosen, rejected = side_by_side(model, pairs)[..., 0].view(*last.shape, -1).gather(2, last[..., None]).unbind(1)
    assert float((chosen - rejected).mean()) == pytest.approx(scorer.metrics[-1]["val/margin"], rel=1e-4)

    policy = task.train(
        tmp_path / "policy",
        "reward.name=null",
        "reward_model.enable=true",
        f"reward_model.model.path={scorer.path / 'model'}",
        "reward_model.micro_batch_size_per_gpu=64",
        "reward_model.fsdp_config.mixed_precision.param_dtype=fp32",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
    )
    for row in policy.metrics:
        if "critic/score/mean" in row:
            assert row["critic/score/mean"] == pytest.approx(row["reward/rm_score_mean"], abs=1e-5)
    samples = [json.loads(line) for line in (policy.path / "generations.jsonl").read_text().splitlines()]
    validated = [sample for sample in samples if sample["split"] != "train"]
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    with torch.no_grad():
        for sample in validated[:8]:
            if sample["finish"] == "stop":
                ids = tokenizer(sample["prompt"] + sample["response"])["input_ids"] + [tokenizer.eos_token_id]
                expected = float(model(torch.tensor([ids])).logits[0, -1, 0])
                assert sample["score"] == pytest.approx(expected, abs=1e-4)
    assert any(name.startswith("val-core/") and value != 0 for name, value in policy.metrics[-1].items())
