"""Models by their names on the hub, with a hub of our own on this machine: the real client talks to it."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.models.tiny import make_tiny_model

pytestmark = pytest.mark.slow  # not part of `make test-quick`

NAME, COMMIT = "somebody/tiny-model", "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]


def digest(content):
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the hub has: a model with its tokenizer, and weights in a format that nobody needs."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    make_tiny_model(folder, "0123456789>+= ")
    (folder / "consolidated.safetensors").write_bytes(b"other weights")
    return folder


@pytest.fixture
def hub(files):
    """A server that answers as the hub does; what it was asked for."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(with_body=True)

        def do_HEAD(self):
            self.answer(with_body=False)

        def answer(self, with_body):
            path = self.path.partition("?")[0]
            if NAME in path:  # the client also asks for things of its own
                asked.append(path)
            if path.startswith(f"/api/models/{NAME}/tree/"):
                tree = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest(file.read_bytes())}
                    for file in files.iterdir()
                ]
                self.reply(json.dumps(tree).encode(), with_body)
            elif path.startswith(f"/api/models/{NAME}"):
                names = [{"rfilename": file.name} for file in files.iterdir()]
                self.reply(json.dumps({"id": NAME, "sha": COMMIT, "siblings": names}).encode(), with_body)
            elif path.startswith(f"/{NAME}/resolve/") and (file := files / path.rpartition("/")[2]).is_file():
                self.reply(file.read_bytes(), with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def reply(self, content, with_body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{digest(content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def run(tmp_path, endpoint, program, *words, **more):
    """A program in a process of its own: the client reads its environment when it is imported."""
    environment = {
        "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "HOME": str(tmp_path), **more,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


FOLDER = "import sys; from meshrl.models.hub import folder_of; print(folder_of(sys.argv[1], lambda line: None))"
DRY_RUN_ENDED = f"/{NAME}/dry-run-ended"
# A dry run and then a run by one process, which tells the hub when the first has ended: most of the time goes into
# imports. The run's picture is not looked at here, and takes longer to draw than the run to train.
TRAIN = f"""import http.client, os, sys; from meshrl.cli import main
assert main([*sys.argv[1:], "--dry-run"]) == 2
hub = http.client.HTTPConnection(os.environ["HF_ENDPOINT"].partition("//")[2])
hub.request("GET", "{DRY_RUN_ENDED}")
hub.getresponse()
import meshrl.telemetry.report as report; report.write_curves = lambda *_: None
sys.exit(main(sys.argv[1:]))"""
# Two plans by one process, the second of another model: most of the time goes into imports.
PLANS = """import sys; from meshrl.cli import main
other, *words = sys.argv[1:]
assert main(words) == 0
sys.exit(main([*words[:-1], other]))"""


def test_a_name_is_downloaded_once_and_then_found(tmp_path, hub, files):
    endpoint, asked = hub
    code, out, err = run(tmp_path, endpoint, FOLDER, NAME)
    assert code == 0, err
    folder = Path(out.strip())
    assert folder.name == COMMIT
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (files / name).read_bytes()
    assert not (folder / "consolidated.safetensors").exists()
    del asked[:]
    assert run(tmp_path, endpoint, FOLDER, NAME)[1] == out
    assert run(tmp_path, "http://127.0.0.1:9", FOLDER, NAME, HF_HUB_OFFLINE="1")[1] == out
    assert asked == []
    # A download that was cut short is not taken for the model: the rest of it is fetched.
    (folder / "model.safetensors").resolve().unlink()
    (folder / "model.safetensors").unlink()
    assert run(tmp_path, endpoint, FOLDER, NAME)[1] == out
    assert (folder / "model.safetensors").read_bytes() == (files / "model.safetensors").read_bytes()
    assert asked


def test_what_cannot_be_had_is_said(tmp_path, hub):
    endpoint, _ = hub
    for where, name, more in ((endpoint, "somebody/else", {}), (endpoint, NAME, {"HF_HUB_OFFLINE": "1"})):
        code, _, err = run(tmp_path, where, FOLDER, name, **more)
        assert code == 1
        assert f"{name} is not a folder, not whole in the hub's cache, and could not be downloaded: " in err


def test_a_run_takes_a_name_and_a_dry_run_does_not_download_it(tmp_path, hub, files, monkeypatch, capsys):
    endpoint, asked = hub
    rows = "".join(json.dumps({"prompt": f"{n}+1=", "ground_truth": str(n + 1)}) + "\n" for n in range(8))
    (tmp_path / "train.jsonl").write_text(rows)
    words = (
        "train", "demo_grpo", f"actor_rollout_ref.model.path={NAME}", "data.train_files=[train.jsonl]",
        "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "reward.name=exact_match",
        "trainer.total_training_steps=1", "trainer.device=cpu", "trainer.default_local_dir=run", "data.val_files=[]",
        "trainer.test_freq=-1", "trainer.val_before_train=false",
    )  # fmt: skip
    code, out, err = run(tmp_path, endpoint, TRAIN, *words)
    assert code == 0, err + out
    assert f"a run downloads it; 'hf download {NAME}' does so now" in err
    assert asked[0] == DRY_RUN_ENDED
    assert len(asked) > 1
    assert f"note: downloading {NAME} from the hub" in err
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert f"{COMMIT}" in (tmp_path / "run" / "config.yaml").read_text()
    # What is in the cache is planned without a network; a model that nobody has downloaded is not known.
    plan = ("plan", "demo_grpo", "--gpus", "1xH100")
    offline = {"HF_HUB_OFFLINE": "1"}
    known, other = (f"actor_rollout_ref.model.path={name}" for name in (NAME, "some/other"))
    code, out, err = run(tmp_path, endpoint, PLANS, other, *plan, known, **offline)
    assert code == 2, err
    assert COMMIT in out
    # A folder of that name comes first.
    shutil.copytree(files, tmp_path / NAME, ignore=shutil.ignore_patterns("consolidated*"))
    monkeypatch.chdir(tmp_path)
    code, err = main([*words, "--dry-run"]), capsys.readouterr().err
    assert code == 0, err
    assert "read from" not in err
