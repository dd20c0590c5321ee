"""`meshrl generate`: rows in, rows with answers out; a killed run goes on and gives the same."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import meshrl.serving.offline as offline
from meshrl.cli import main
from meshrl.models.loading import load_tokenizer
from meshrl.rollout import build
from meshrl.rollout.build import EngineOptions, open_rollout
from meshrl.rollout.requests import SamplingParams
from meshrl.serving.offline import Job, Journal, generate

ROWS = [
    {"prompt": "1+2=", "id": 0},
    {"prompt": "", "id": 1},
    {"prompt": None, "id": 2},
    {"prompt": "a" * 64, "id": 3},
    {"prompt": [3, 4, 5], "id": 4},
    {"prompt": [{"role": "user", "content": "hi"}], "id": 5},
    {"prompt": "\ud800", "id": 6},
    {"prompt": [999], "id": 7},
    {"prompt": "abc", "id": 8},
]
SMALL = EngineOptions(max_num_seqs=8)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_job(folder: Path, prompts: Path, out: str, **fields) -> Job:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 7), n=fields.pop("n", 2))
    return Job(str(folder), prompts, prompts.parent / out, params, **fields)


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO())


def test_every_row_has_its_answers_or_an_error(tiny_model_folder, tmp_path, quiet):
    prompts = write_rows(tmp_path / "in.jsonl", ROWS)
    job = make_job(tiny_model_folder, prompts, "out.jsonl", token_ids=True)
    line = generate(job, SMALL, quiet)
    assert "wrote 9 rows" in line
    assert "6 failed" in line
    assert "; first error (1 of 6): " in line
    assert "9 of 9 rows" in quiet.file.getvalue()
    rows = read_rows(job.out)
    assert [row["id"] for row in rows] == list(range(9))
    assert [row["id"] for row in rows if row["error"] is None] == [0, 4, 8]
    errors = {row["id"]: row["error"] for row in rows}
    assert "64 tokens" in errors[3]
    assert "chat template" in errors[5]
    assert "999" in errors[7]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(tiny_model_folder)
    for row in (rows[0], rows[4], rows[8]):
        prompt = tokenizer(row["prompt"])["input_ids"] if isinstance(row["prompt"], str) else row["prompt"]
        assert len(row["responses"]) == 2
        for text, tokens, log_probs in zip(
            row["responses"], row["response_token_ids"], row["response_log_probs"], strict=True
        ):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (torch.tensor(log_probs) - wanted).abs().max() < 1e-4
            assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert not list(tmp_path.glob("*.partial"))


def test_a_prompt_that_the_chat_template_refuses_fails_alone(tiny_model_folder, tmp_path, quiet):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{% if messages[1:] %}{{ raise_exception('one turn only') }}{% endif %}1+2="
    tokenizer.save_pretrained(folder)
    turn = {"role": "user", "content": "1"}
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": [turn]}, {"prompt": [turn, turn]}, {"prompt": "1"}])
    assert "1 failed" in generate(make_job(folder, prompts, "out.jsonl", n=1), SMALL, quiet)
    before, refused, after = (row["error"] for row in read_rows(tmp_path / "out.jsonl"))
    assert before is after is None
    assert refused.startswith("row 2: the prompt cannot be tokenized (one turn only)")
    assert "3 of 3 rows" in quiet.file.getvalue()
    assert ", 1 failed" in quiet.file.getvalue()


def test_a_job_of_which_every_row_failed_fails(tiny_model_folder, tmp_path, capsys):
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": [999]}, {"prompt": [999]}])
    assert main(["generate", str(tiny_model_folder), "--prompts", str(prompts), "--out", f"{tmp_path}/out.jsonl"]) == 1
    assert "2 failed" in (said := capsys.readouterr().err)
    assert "\r" not in said  # no bar of transformers' own
    assert "; first error (2 of 2): " in said
    assert all("999" in row["error"] for row in read_rows(tmp_path / "out.jsonl"))


def test_a_model_without_a_tokenizer_is_refused(tiny_model_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(tiny_model_folder) / name).read_bytes())
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        open_rollout(tmp_path, SMALL)


def test_texts_go_on_where_the_prompt_ends(tiny_model_folder, tmp_path, quiet):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    words = {
        name: i for i, name in enumerate(["<pad>", "<eos>", *(f"▁{i}" for i in range(len(load_tokenizer(folder))))])
    }
    inner = FastTokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": "1 2"}, {"prompt": [3, 4]}, {"prompt": [{"role": "user", "content": "1 2"}]}]
    prompts = write_rows(tmp_path / "in.jsonl", rows)
    generate(make_job(folder, prompts, "out.jsonl", n=1), SMALL, quiet)
    texts = [row["responses"][0] for row in read_rows(tmp_path / "out.jsonl")]
    assert [text[0] for text in texts[:2]] == [" ", " "]
    assert texts[2][0] != " "


def test_failures_are_counted_as_they_come(tmp_path):
    results = [(i, {"responses": [], "error": "no" if i % 3 else None}) for i in range(10)]
    with Journal(tmp_path / "partial", "same") as journal:
        journal.add(results)
        assert journal.failed == 6
    with Journal(tmp_path / "partial", "same") as journal:
        assert (len(journal.results), journal.failed) == (10, 6)


def test_a_job_is_known_by_what_decides_its_answers():
    job = Job("model", Path("in"), Path("out"), SamplingParams(3))
    rows = [{"prompt": "1"}]
    plain = job.fingerprint(rows, EngineOptions(device="cpu"))
    sizes = EngineOptions(device="cpu", max_num_seqs=3, max_num_batched_tokens=9, gpu_memory_utilization=0.1)
    assert job.fingerprint(rows, sizes) == plain
    others = [
        EngineOptions(device="cpu", engine="hf"),
        EngineOptions(device="cpu", dtype="bfloat16"),
        EngineOptions(device="cpu", max_model_len=9),
        EngineOptions(device="cpu", engine="vllm"),
        EngineOptions(device="cpu", engine="vllm", arguments={"seed": 3}),
        EngineOptions(device="meta"),
    ]
    assert len({plain, *(job.fingerprint(rows, options) for options in others)}) == 7


def test_parquet_from_lines_has_the_columns_of_all_rows(tiny_model_folder, tmp_path, quiet):
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": "1"}, {"prompt": "2", "late": 3}])
    job = make_job(tiny_model_folder, prompts, "out.parquet", n=1)
    generate(job, SMALL, quiet)
    assert pq.read_table(job.out)["late"].to_pylist() == [None, 3]


def test_parquet_keeps_its_columns_and_types(tiny_model_folder, tmp_path, quiet):
    import pyarrow as pa

    table = pa.table(
        {"prompt": ["1", "ab", "c="], "weight": pa.array([1, 2, 3], pa.int8()), "raw": [b"\xff", b"", b"1"]}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    job = make_job(tiny_model_folder, tmp_path / "in.parquet", "out.parquet", n=1)
    generate(job, SMALL, quiet)
    out = pq.read_table(job.out)
    assert out.select(["prompt", "weight", "raw"]) == table
    assert [len(answers) for answers in out["responses"].to_pylist()] == [1, 1, 1]
    assert set(out["finish_reasons"].to_pylist()[0]) <= {"stop", "length"}
    assert out["error"].to_pylist() == [None] * 3
    again = make_job(tiny_model_folder, tmp_path / "in.parquet", "again.jsonl", n=1)
    generate(again, EngineOptions(max_num_seqs=2), quiet)


def test_an_interrupted_run_goes_on_where_it_was(tiny_model_folder, tmp_path, quiet, monkeypatch):
    rows = [{"prompt": f"{i}+", "id": i} for i in range(23)]
    prompts = write_rows(tmp_path / "in.jsonl", rows)
    whole = make_job(tiny_model_folder, prompts, "whole.jsonl", n=1)
    generate(whole, SMALL, quiet)

    broken = make_job(tiny_model_folder, prompts, "broken.jsonl", n=1)
    results = offline._Run._results
    calls = []

    def interrupted(self, group, answers):
        calls.append(group)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return results(self, group, answers)

    monkeypatch.setattr(offline._Run, "_results", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(broken, SMALL, quiet)
    monkeypatch.undo()
    partial = broken.out.with_name("broken.jsonl.partial")
    kept = len(partial.read_text().splitlines()) - 1
    assert 0 < kept < 23
    assert not broken.out.exists()
    # As a kill in the middle of a line would leave it.
    with partial.open("a") as file:
        file.write('{"row": 22, "respon')
    line = generate(broken, SMALL, quiet)
    assert f"{kept} were there already" in line
    assert read_rows(broken.out) == read_rows(whole.out)


def test_a_job_that_failed_before_its_first_answer_is_not_in_the_way(tiny_model_folder, tmp_path, quiet):
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": "1"}])
    with pytest.raises(OSError, match="no model at"):
        generate(make_job(tmp_path / "mistyped", prompts, "out.jsonl"), SMALL, quiet)
    assert (tmp_path / "out.jsonl.partial").exists()
    generate(make_job(tiny_model_folder, prompts, "out.jsonl"), SMALL, quiet)
    assert len(read_rows(tmp_path / "out.jsonl")) == 1


def test_results_of_another_job_are_not_mixed_in(tiny_model_folder, tmp_path, quiet):
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": "1"}])
    job = make_job(tiny_model_folder, prompts, "out.jsonl")
    partial = job.out.with_name("out.jsonl.partial")
    partial.write_text('{"fingerprint": "of another"}\n{"row": 0, "responses": ["x"], "error": null}\n')
    with pytest.raises(ValueError, match="--restart"):
        generate(job, SMALL, quiet)
    generate(make_job(tiny_model_folder, prompts, "out.jsonl", restart=True), SMALL, quiet)
    with pytest.raises(ValueError, match="there already"):
        generate(job, SMALL, quiet)
    generate(make_job(tiny_model_folder, prompts, "out.jsonl", restart=True), SMALL, quiet)


@pytest.mark.parametrize(
    ("rows", "fields", "words"),
    [
        ([{"question": "1"}], {}, "it has: question"),
        ([{"prompt": "1", "error": "?"}], {}, "column 'error'"),
        ([{"prompt": "1"}], {"out": "out.csv"}, ".parquet or .jsonl"),
        ([{"prompt": "1"}], {"out": "no/where.jsonl"}, "no folder"),
        (
            [{"prompt": "1", "a": 1}, {"prompt": "1", "a": "x"}],
            {"out": "out.parquet"},
            "do not fit into a parquet table",
        ),
        ([{"prompt": "1", "a": {}}], {"out": "out.parquet"}, "do not fit into a parquet table"),
        ([{"prompt": "1", "a": 2**70}], {"out": "out.parquet"}, "do not fit into a parquet table"),
        ([{"prompt": "1"}], {"out": "in.jsonl", "restart": True}, "is the file of the prompts"),
        ([{"prompt": "1"}], {"seed": -1}, "seed"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(tmp_path, quiet, rows, fields, words):
    prompts = write_rows(tmp_path / "in.jsonl", rows)
    out = fields.pop("out", "out.jsonl")
    with pytest.raises((ValueError, OSError), match=words):
        generate(make_job(Path("/no/model"), prompts, out, **fields), SMALL, quiet)


def test_a_killed_command_goes_on(tiny_model_folder, tmp_path, capsys):
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": f"{i}="} for i in range(1000)])
    words = ["generate", str(tiny_model_folder), "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")]
    words += ["--max-tokens", "3", "--max-num-seqs", "1", "--device", "cpu"]
    partial = tmp_path / "out.jsonl.partial"
    process = subprocess.Popen([sys.executable, "-m", "meshrl.cli", *words], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 100
    while not (partial.exists() and partial.read_bytes().count(b"\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lines = partial.read_bytes().count(b"\n") - 1
    # The rest at full width: what matters is that the finished rows are not done again.
    words[words.index("1")] = "512"
    assert main(words) == 0
    assert f"{lines} were there already, 0 failed" in capsys.readouterr().out
    assert len(read_rows(tmp_path / "out.jsonl")) == 1000


def test_options_that_do_nothing_are_refused(tiny_model_folder, capsys):
    for options, words in (
        (EngineOptions(gpu_memory_utilization=0.0), "gpu_memory_utilization"),
        (EngineOptions(arguments={"swap_space": 1}), "swap_space"),
        (EngineOptions(engine="abacus"), "embedded, vllm, sglang, hf"),
        (EngineOptions(dtype="int3"), "dtype"),
        (EngineOptions(device="abacus"), "device"),
        (EngineOptions(max_model_len=10**6), "64 tokens"),
        (EngineOptions(engine="hf", max_num_batched_tokens=9), "max_num_batched_tokens is 9, but the hf engine"),
        (EngineOptions(engine="hf", quantization="fp8"), "quantization is fp8, but the hf engine does not read it"),
        (EngineOptions(device="cpu", kv_cache_dtype="fp8"), "kv_cache_dtype=fp8 is for GPUs"),
        (EngineOptions(engine="hf", gpu_memory_utilization=0.9), "gpu_memory_utilization is 0.9, but the hf engine"),
    ):
        with pytest.raises(ValueError, match=words):
            open_rollout(tiny_model_folder, options)
    assert main(["serve", str(tiny_model_folder), "--max-concurrency", "0"]) == 2
    assert main(["serve", "/no/such/model"]) == 1
    assert main(["serve", str(tiny_model_folder), "--engine-arg", "x"]) == 2
    assert "max_concurrency must be above 0" in capsys.readouterr().err


def test_devices_are_those_asked_for(tiny_model_folder, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for engine in ("vllm", "sglang"):
        with pytest.raises(ValueError, match=rf"{engine} takes a GPU where torch sees one, and it sees 2: hide them"):
            open_rollout(tiny_model_folder, EngineOptions(engine=engine, device="cpu"))
    with pytest.raises(ValueError, match="torch sees 2 GPUs"):
        open_rollout(tiny_model_folder, EngineOptions(device="cuda:2"))
    assert taken == []

    def built(config, *_, **fields):
        raise OSError(f"{config.name} on {taken}")

    monkeypatch.setattr(build, "build_rollout", built)
    with pytest.raises(OSError, match=r"vllm on \[device\(type='cuda', index=1\)\]"):
        open_rollout(tiny_model_folder, EngineOptions(engine="vllm", device="cuda:1"))


def test_the_hf_engine_generates_the_same_log_probs(tiny_model_folder, tmp_path, quiet):
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": "12"}, {"prompt": "ab+"}])
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    answers = []
    for engine in ("hf", "embedded"):
        job = Job(str(tiny_model_folder), prompts, tmp_path / f"{engine}.jsonl", greedy, token_ids=True)
        generate(job, EngineOptions(engine=engine), quiet)
        answers.append(read_rows(job.out))
    for one, other in zip(*answers, strict=True):
        assert one["response_token_ids"] == other["response_token_ids"]
        difference = torch.tensor(one["response_log_probs"]) - torch.tensor(other["response_log_probs"])
        assert difference.abs().max() < 1e-4


def test_variables_of_the_chat_template(tiny_model_folder, tmp_path, capsys):
    """A variable that the template reads makes the answers those of the text it stands for."""
    model = shutil.copytree(tiny_model_folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{% if ending %}{{ ending }}{% endif %}")
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": [{"role": "user", "content": "1+2"}]}, {"prompt": "1+2="}])
    call = ["generate", str(model), "--prompts", str(prompts), "--max-tokens", "6", "--temperature", "0"]
    assert main([*call, "--out", f"{tmp_path}/a.jsonl", "--token-ids", "--chat-template-arg", "ending=="]) == 0
    chat, text = (row["response_token_ids"] for row in read_rows(tmp_path / "a.jsonl"))
    assert chat == text
    assert main([*call, "--out", f"{tmp_path}/b.jsonl", "--token-ids"]) == 0
    assert read_rows(tmp_path / "b.jsonl")[0]["response_token_ids"] != text
    capsys.readouterr()
    for argument, words in (
        ("tools=1", "'tools' cannot be set"),
        ("end=1", "does not mention 'end'"),
        ("x", "KEY=VALUE"),
    ):
        assert main([*call, "--out", f"{tmp_path}/c.jsonl", "--chat-template-arg", argument]) == 2
        assert words in capsys.readouterr().err
