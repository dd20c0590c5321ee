"""RL raises the held-out accuracy, by the checker's rewards and by nothing else."""

import json
import re

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ACCURACY = "val-core/sort_digits/acc/mean@1"
# As many as the demo has.
SAMPLES = (
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.rollout.n=8",
)


def accuracies(run):
    return [row[ACCURACY] for row in run.metrics if ACCURACY in row]


def test_grpo_learns_and_coin_tosses_do_not(task, tmp_path):
    data = (f"data.train_files=[{task.files['all_prompts']}]", f"data.val_files=[{task.files['all_held_out']}]")
    steps = ("trainer.total_training_steps=50", "trainer.test_freq=50", *data, *SAMPLES)
    learned = task.train(tmp_path / "grpo", *steps)
    before, after = accuracies(learned)
    assert before < 0.45
    assert after > 0.55
    fewer = ("trainer.total_training_steps=25", "trainer.test_freq=25")
    control = task.train(tmp_path / "control", *steps, *fewer, "reward.name=coin_toss")
    start, end = accuracies(control)
    assert start == before
    assert end < start + 0.1
    assert 0.4 < control.metrics[-1]["critic/score/mean"] < 0.6

    # A teacher says of each token what a checker says of whole answers: the same start comes most of the way in fewer
    # steps.
    taught = task.train(
        tmp_path / "taught",
        *data,
        "algorithm.adv_estimator=distillation",
        f"actor_rollout_ref.ref.model.path={learned.path / 'model'}",
        "data.train_batch_size=256",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=128",
        "trainer.total_training_steps=20",
        "trainer.test_freq=20",
        "trainer.val_before_train=false",
    )
    assert accuracies(taught)[-1] > before + 0.6 * (after - before)
    assert taught.metrics[-1]["distillation/reverse_kl"] < 0.5 * taught.metrics[0]["distillation/reverse_kl"]

    # The model it wrote is the one that was validated: plain transformers finds the same accuracy.
    model = AutoModelForCausalLM.from_pretrained(learned.path / "model")
    tokenizer = AutoTokenizer.from_pretrained(learned.path / "model")
    with open(task.files["all_held_out"]) as lines:
        rows = [json.loads(line) for line in lines]
    ids = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in rows])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    right = [text == "".join(sorted(row["extra_info"]["digits"])) for text, row in zip(texts, rows, strict=True)]
    assert abs(sum(right) / len(right) - after) < 0.01


def test_a_run_leaves_its_folder(task, pictures, tmp_path):
    run = task.train(
        tmp_path / "run",
        *SAMPLES,
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        "trainer.test_freq=2",
    )
    for name in ("config.yaml", "metrics.jsonl", "generations.jsonl", "report.html", "curves.png", "log.txt", "model"):
        assert (run.path / name).exists(), name
    last = run.metrics[-1]
    assert last["val-core/sort_digits/acc/mean@4"] <= last["val-core/sort_digits/acc/pass@4"]
    assert last["val-core/sort_digits/acc/pass@1"] == last["val-core/sort_digits/acc/mean@4"]
    samples = [json.loads(line) for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()]
    assert len(samples) == 512
    checked = [s["score"] == float(s["response"] == "".join(sorted(s["prompt"][:-1]))) for s in samples]
    assert all(checked)
    check_what_is_kept_of_samples(run, samples)
    phases = [value for name, value in last.items() if name.startswith("timing_s/") and name != "timing_s/step"]
    assert abs(sum(phases) - last["timing_s/step"]) < 1e-6


def check_what_is_kept_of_samples(run, samples):
    """The spread of the first step is that of all its samples; the few that are kept have their tokens."""
    spread = json.loads((run.path / "distributions.jsonl").read_text().splitlines()[0])
    right = sum(sample["score"] for sample in samples)
    assert spread["score"] == {"values": [0.0, 1.0], "counts": [512 - right, right]}
    # Six digits and the end fill the maximum of seven: by their length alone nearly all would look cut.
    unended = [sample for sample in samples if sample["finish"] == "length"]
    assert spread["finish"].get("length", 0) == len(unended) < 300
    assert all(len(sample["response"]) <= 6 for sample in samples if sample["finish"] == "stop")
    kept = [json.loads(line) for line in (run.path / "generations.jsonl").read_text().splitlines()]
    for sample in kept:
        tokens = sample["tokens"]
        assert re.sub("<.*?>", "", "".join(tokens["text"])) == sample["response"]
        assert (tokens["text"][-1] == "<eos>") == (sample["finish"] == "stop")
        assert len(tokens["log_prob"]) == len(tokens["text"])
        assert ("advantage" in tokens) == (sample["split"] == "train")
    assert {sample["tokens"]["version"] for sample in kept if sample["split"] == "train"} == {0, 1}
