"""Runs of `meshrl prefer kto`: their numbers against plain transformers, two layouts, what is learned and what for."""

import json
import random

import pytest
import torch
from test_layouts import compare
from test_preference_runs import BETA, STEPS, log_prob, pair, runs_of, shaken_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS, WEIGHTS = 12, (1.5, 0.5)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Good and bad answers to random prompts, two to some; held-out ones; and the same, judged the other way round."""
    folder, rng = tmp_path_factory.mktemp("judged"), random.Random(0)
    rows = []
    while len(rows) < 1024:
        made = pair("".join(str(rng.randint(0, 9)) for _ in range(6)), rng)
        good = {"prompt": made["prompt"], "response": made["chosen"], "label": True}
        bad = good | {"response": made["rejected"], "label": False}
        rows += rng.choice([[good], [bad], [good, bad]] if made["chosen"] != made["rejected"] else [[good]])
    turned = [row | {"label": not row["label"]} for row in rows]
    found = {}
    for name, part in (("train", rows[:960]), ("val", rows[960:1024]), ("turned", turned[:960])):
        found[name] = folder / f"{name}.jsonl"
        found[name].write_text("".join(json.dumps(row) + "\n" for row in part))
    return found


@pytest.fixture(scope="module")
def run(task, files):
    weights = f"loss.desirable_weight={WEIGHTS[0]}", f"loss.undesirable_weight={WEIGHTS[1]}"
    return runs_of("kto", task, files["train"], *weights, "data.max_token_len_per_gpu=60")  # several micro-batches


@pytest.fixture(scope="module")
def unsure(task, tmp_path_factory):
    """A model that likes answers to other prompts better than the task's own does: the baseline is above zero."""
    return shaken_model(task, tmp_path_factory.mktemp("unsure") / "model")


@pytest.fixture(scope="module")
def against_the_task(task, unsure):
    return f"model.path={unsure}", f"reference.path={task.model}"


@pytest.fixture(scope="module")
def one_process(run, against_the_task, tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), *against_the_task)


def steps_by_hand(files, policy, reference, steps=STEPS):
    """The metrics of some steps with plain transformers, one sequence at a time."""
    model, frozen = (AutoModelForCausalLM.from_pretrained(path) for path in (policy, reference))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    rows = [json.loads(line) for line in files["train"].read_text().splitlines()]

    def ratio(asked, answered):
        prompt = tokenizer(asked["prompt"])["input_ids"]
        told = tokenizer(answered["response"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([*prompt, *told, tokenizer.eos_token_id])
        with torch.no_grad():
            expected = log_prob(frozen, ids, len(prompt))[0]
        return log_prob(model, ids, len(prompt))[0] - expected

    found = []
    for step in range(steps):
        places = range(ROWS * step, ROWS * step + ROWS)
        others = [next(row for row in rows[at:] if row["prompt"] != rows[at]["prompt"]) for at in places]
        with torch.no_grad():
            strange = [ratio(rows[at], other) for at, other in zip(places, others, strict=True)]
            baseline = torch.stack(strange).mean().clamp(min=0)
        ratios = torch.stack([ratio(rows[at], rows[at]) for at in places])
        good = torch.tensor([rows[at]["label"] for at in places])
        lead = BETA * torch.where(good, ratios - baseline, baseline - ratios)
        loss = (torch.where(good, *WEIGHTS) * (1 - lead.sigmoid())).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(
            {"train/loss": loss, "train/grad_norm": norm, "train/kl": baseline,
             "train/margin": BETA * (ratios[good].mean() - ratios[~good].mean()),
             "train/accuracy": (lead > 0).float().mean()}
        )  # fmt: skip
    return [{name: float(value.detach()) for name, value in row.items()} for row in found]


def test_steps_are_those_of_plain_transformers(task, files, unsure, one_process):
    expected = steps_by_hand(files, unsure, task.model)
    assert expected[0]["train/kl"] > 0.1
    for row, wanted in zip(one_process.metrics, expected, strict=True):
        assert {key: row[key] for key in wanted} == pytest.approx(wanted, rel=2e-4, abs=2e-5)
    # the control: against itself as the reference it is another run
    assert abs(steps_by_hand(files, unsure, unsure, steps=1)[0]["train/loss"] - expected[0]["train/loss"]) > 0.01


def test_two_processes_give_the_same_run(run, against_the_task, one_process, tmp_path):
    two = run(tmp_path / "run", *against_the_task, "trainer.n_gpus_per_node=2")
    compare(one_process, two, 1e-5)
    assert two.metrics[-1]["train/kl"] == pytest.approx(one_process.metrics[-1]["train/kl"], rel=1e-5)


def test_it_learns_what_is_good_whichever_that_is(files, run, tmp_path):
    longer = (
        "data.train_batch_size=64", "trainer.total_training_steps=15", "optim.lr=3e-3", "model.lora_rank=8",
        "data.max_token_len_per_gpu=8192", f"data.val_files=[{files['val']}]", "trainer.test_freq=15",
    )  # fmt: skip
    learned = run(tmp_path / "learned", *longer).metrics
    assert learned[0]["train/loss"] == pytest.approx(
        sum(WEIGHTS[not json.loads(line)["label"]] for line in files["train"].read_text().splitlines()[:64]) / 128
    )  # half the weights: as yet the policy is the reference
    assert learned[-1]["val/margin"] > 0.2
    turned = run(tmp_path / "turned", *longer, f"data.train_files=[{files['turned']}]").metrics
    assert turned[-1]["val/margin"] < -0.2
