"""The judge: prompts, scores read, retries, order and concurrency against a small server; and through a rollout."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from meshrl.data.batch import object_array
from meshrl.rewards.judge import Judge, RolloutAsk, UrlAsk, as_text, fill, judge
from meshrl.rewards.manager import RewardManager
from meshrl.rewards.reward_calls import RewardFunctionSpec
from meshrl.rollout.requests import Completion, SamplingParams


class Server(ThreadingHTTPServer):
    """Answers each question by `reply(text, how often it was asked)`: (status, what is said, headers)."""

    def __init__(self, reply):
        self.reply, self.asked, self.seen = reply, {}, []
        self.lock, self.running, self.most = threading.Lock(), 0, 0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1/"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"]
        server = self.server
        with server.lock:
            server.running += 1
            server.most = max(server.most, server.running)
            server.asked[text] = server.asked.get(text, 0) + 1
            server.seen.append((self.path, body, self.headers.get("authorization")))
        status, said, headers = server.reply(text, server.asked[text])
        with server.lock:
            server.running -= 1
        data = said if isinstance(said, bytes) else json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    pytest.importorskip("httpx")
    servers = []

    def start(reply):
        servers.append(Server(reply))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_questions_and_replies(serve, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    server = serve(lambda text, _: (200, f"Score: 0.1\nwell, Score: 0.{text[-1]}", {}))
    found = judge(
        data_sources=["s"] * 3,
        solution_strs=["a{prompt}1", "a2", "a3"],
        ground_truths=[None, 7, "t"],
        extra_infos=[{}] * 3,
        prompts=["q1", [{"role": "user", "content": "q2"}], "q3"],
        url=server.url,
        model="m",
        template="{prompt}|{ground_truth}|{other}|{solution_str}",
        max_tokens=9,
        api_key_env="JUDGE_KEY",
    )
    assert [one["score"] for one in found] == [0.1, 0.2, 0.3]
    assert found[2]["judgement"].endswith("Score: 0.3")
    assert set(server.asked) == {"q1||{other}|a{prompt}1", "user: q2|7|{other}|a2", "q3|t|{other}|a3"}
    path, body, key = server.seen[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 9, 0.0)


def test_what_may_pass_is_tried_again_and_the_rest_is_not(serve):
    def reply(text, times):
        if text == "busy" and times < 3:
            return 429, b"later", {"retry-after": "0"}
        if text == "down":
            return 503, b"down", {}
        if text == "bad":
            return 400, b"no such model", {}
        return 200, {"odd": b"{}"}.get(text, "Score: 1"), {}

    server = serve(reply)
    found = UrlAsk(server.url, "m", retries=2, backoff=0.01)(["busy", "down", "bad", "odd", "fine"])
    assert (found[0], found[4]) == ("Score: 1", "Score: 1")
    assert [str(one).partition(":")[0] for one in found[1:4]] == [
        "the judge answered 503",
        "the judge answered 400",
        "the judge's reply is not that of a chat model",
    ]
    assert server.asked == {"busy": 3, "down": 3, "bad": 1, "odd": 1, "fine": 1}
    (odd,) = UrlAsk("http://judge:port", "m", retries=1, backoff=0.01)(["x"])
    assert "is not a URL" in str(odd)
    (lost,) = UrlAsk("http://127.0.0.1:9", "m", retries=1, backoff=0.01)(["x"])
    assert "cannot be reached: ConnectError" in str(lost)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_at_a_time_and_no_more_in_order(serve, concurrency):
    meet = threading.Barrier(concurrency)

    def reply(text, _):
        meet.wait(30)
        return 200, text, {}

    texts = [str(n) for n in range(6)]
    server = serve(reply)
    assert UrlAsk(server.url, "m", concurrency=concurrency, timeout=60)(texts) == texts
    assert server.most <= concurrency


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 0.5", 0.5),
        ("Score: 7", 1.0),
        ("Score: -2", 0.0),
        ("none", None),
        ("Score: x", None),
        ("**Score:** 0.8", 0.8),
        ("Score: .5", 0.5),
        ("Score: 1e-1", 0.1),
        ("Score: $0.25$ of 1", 0.25),
        ("", None),
    ],
)
def test_scores_are_read_and_cut(reply, score):
    found = Judge(lambda texts: [reply]).read(reply)
    if score is None:
        assert "holds no score" in str(found)
    else:
        assert found["score"] == score


def test_a_reply_without_a_score_fails_only_its_sample(data, tokenizer):
    data.non_tensor_batch["raw_prompt"] = object_array(["p"] * 4)
    asked = Judge(lambda texts: ["Score: 1", "?", OSError("down"), "Score: 0"])
    manager = RewardManager([RewardFunctionSpec("judge", function=asked)], tokenizer, on_error="zero")
    scores, extra, metrics = manager(data)
    assert scores.sum(1).tolist() == [1, 0, 0, 0]
    assert metrics["reward/errors/raised"] == 2
    assert extra["judgement"].tolist() == ["Score: 1", None, None, "Score: 0"]


def test_patterns_and_bounds_that_are_wrong():
    with pytest.raises(ValueError, match="exactly one group"):
        Judge(lambda texts: [], pattern="score")
    with pytest.raises(ValueError, match="must be below"):
        Judge(lambda texts: [], low=1, high=1)
    with pytest.raises(ValueError, match="concurrency >= 1"):
        UrlAsk("u", "m", concurrency=0)


class Echo:
    """A rollout that answers with the question's last characters, or fails."""

    def complete(self, requests):
        self.requests = requests
        return [
            Completion(r.request_id, 0, list(r.prompt_token_ids[-2:]), finish_reason="stop")
            if len(r.prompt_token_ids) > 2
            else Completion(r.request_id, 0, finish_reason="error", error="too short")
            for r in requests
        ]


def test_a_judge_in_a_rollout(tokenizer, chat_tokenizer):
    rollout, params = Echo(), SamplingParams(max_tokens=4, temperature=0)
    found = RolloutAsk(rollout, tokenizer, params)(["a=12", "b", "c=30"])
    assert (found[0], found[2]) == ("12", "30")
    assert "too short" in str(found[1])
    assert len({request.request_id for request in rollout.requests}) == 3
    RolloutAsk(rollout, chat_tokenizer, params)(["abc"])
    assert chat_tokenizer.decode(rollout.requests[0].prompt_token_ids) == "<user>abc<eos><assistant>"


def test_filling_and_text():
    assert fill("{a}{b}{c}", a="{b}", b="x") == "{b}x{c}"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert as_text(messages) == "system: s\n\nuser: u"
