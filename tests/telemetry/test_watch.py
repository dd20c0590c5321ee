"""A run watched while it is written: what is new since a mark, files that are cut, replaced or gone, and the server."""

import http.client
import json
import random
import re
import shutil
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from test_report import HOSTILE, Page

from meshrl.telemetry import live_report
from meshrl.telemetry.live_report import LOOPBACK, FollowedFile, Mark, WatchedRun, make_server
from meshrl.telemetry.panels import merge_steps
from meshrl.telemetry.run_folder import RunFiles, RunFolder


def log(run, step, **more):
    metrics = {"critic/score/mean": step / 10, "timing_s/gen": 1.0, "timing_s/step": 1.0, **more}
    run.append_metrics(metrics, step)
    run.append_generations([{"prompt": f"prompt {step}", "response": "r", "score": 1.0}], step)


# Files that grow


def test_rows_come_as_their_lines_end(tmp_path):
    file = tmp_path / "a.jsonl"
    followed = FollowedFile(file)
    followed.read_on()
    assert followed.rows == []
    lines = [json.dumps({"step": i, "text": "é" * (i % 7)}, ensure_ascii=False) + "\n" for i in range(50)]
    whole = "".join(lines).encode()
    rng, written = random.Random(0), 0
    with open(file, "wb", buffering=0) as out:
        while written < len(whole):
            size = rng.randint(1, 90)
            out.write(whole[written : written + size])
            written = min(written + size, len(whole))
            followed.read_on()
            # As many rows as lines have ended, whatever stands behind them.
            assert len(followed.rows) == whole[:written].count(b"\n")
    assert followed.rows == [{"step": i, "text": "é" * (i % 7)} for i in range(50)]
    assert followed.offset == len(whole)
    assert followed.began_anew == 0


def test_lines_that_are_none_are_left_out(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"step": 1}\nnot json\n\xff\xfe\n[1]\n\n{"step": 2}\n{"step"')
    followed = FollowedFile(file)
    followed.read_on()
    assert [row["step"] for row in followed.rows] == [1, 2]


@pytest.mark.parametrize("how", ["shorter", "other file, longer", "same place, other content", "gone and back"])
def test_a_file_that_was_cut_or_replaced_is_read_anew(tmp_path, how):
    file = tmp_path / "a.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    followed = FollowedFile(file)
    followed.read_on()
    if how == "shorter":
        file.write_text('{"step": 1}\n')
    elif how == "other file, longer":
        aside = tmp_path / "b"
        aside.write_text('{"step": 1}\n{"step": 7}\n{"step": 8}\n')
        aside.replace(file)
    elif how == "same place, other content":
        with open(file, "r+") as out:
            out.write('{"step": 5}\n{"step": 6}\n{"step": 7}\n')
    else:
        file.unlink()
        followed.read_on()
        assert followed.rows == []
        file.write_text('{"step": 3}\n')
    followed.read_on()
    assert followed.began_anew == 1
    assert followed.rows == [json.loads(line) for line in file.read_text().splitlines()]


# What is new


def test_news_are_what_came_after_the_mark(tmp_path):
    run = RunFolder(tmp_path)
    watched = WatchedRun(tmp_path, share=1)
    log(run, 1)
    first = watched.news(Mark())
    assert first["state"] == "running"
    assert first["reset"]
    assert [sample["step"] for sample in first["samples"]] == [1]
    assert "0.100" in first["sections"]["head"]
    mark = Mark.parse(first["mark"])
    again = watched.news(mark)
    assert set(again) == {"state", "mark", "age"}
    assert again["mark"] == first["mark"]
    for step in (2, 3):
        log(run, step)
    second = watched.news(mark)
    assert "reset" not in second
    assert [sample["step"] for sample in second["samples"]] == [3, 2]
    assert "0.100 → 0.300" in second["sections"]["head"]
    # Who has seen nothing gets everything, at any time.
    assert len(watched.news(Mark())["samples"]) == 3
    assert watched.news(Mark.parse("9-9-9"))["reset"]


def test_a_half_written_step_is_not_shown_before_its_line_ends(tmp_path):
    run = RunFolder(tmp_path)
    log(run, 1)
    watched = WatchedRun(tmp_path, share=1)
    mark = watched.news(Mark())["mark"]
    line = json.dumps({"step": 2, "critic/score/mean": 0.9}) + "\n"
    with open(run.metrics, "a") as out:
        out.write(line[:20])
        out.flush()
        assert watched.news(Mark.parse(mark))["mark"] == mark
        out.write(line[20:])
    assert "0.900" in watched.news(Mark.parse(mark))["sections"]["head"]


def test_a_run_that_has_not_begun_is_waited_for(tmp_path):
    folder = tmp_path / "later"
    watched = WatchedRun(folder, share=1)
    before = watched.news(Mark())
    assert (before["state"], before["age"]) == ("waiting", None)
    assert "has not logged a step yet" in watched.page()
    run = RunFolder(folder)
    run.write_config({"trainer": {"experiment_name": "young"}})
    mark = Mark.parse(before["mark"])
    assert watched.news(mark)["state"] == "waiting"
    log(run, 1)
    begun = watched.news(mark)
    assert begun["state"] == "running"
    assert begun["title"] == "young"
    assert "young" in begun["sections"]["head"]


def test_the_config_of_a_waiting_run_is_shown_when_it_comes(tmp_path):
    watched = WatchedRun(tmp_path, share=1)
    watched.news(Mark())
    RunFolder(tmp_path).write_config({"some": {"key": 1234}})
    assert "some.key" in watched.page()


def test_a_deleted_run_leaves_what_was_seen_and_a_new_one_takes_its_place(tmp_path):
    folder = tmp_path / "run"
    log(RunFolder(folder), 1)
    watched = WatchedRun(folder, share=1)
    first = watched.news(Mark())
    shutil.rmtree(folder)
    gone = watched.news(Mark.parse(first["mark"]))
    assert (gone["state"], gone["mark"]) == ("gone", first["mark"])
    assert "0.100" in watched.page()
    log(RunFolder(folder), 5)
    back = watched.news(Mark.parse(first["mark"]))
    assert (back["state"], back["reset"]) == ("running", True)
    assert [sample["step"] for sample in back["samples"]] == [5]


def test_a_run_that_goes_on_from_a_checkpoint_loses_its_later_steps(tmp_path):
    run = RunFolder(tmp_path)
    for step in range(1, 6):
        log(run, step)
    watched = WatchedRun(tmp_path, share=1)
    mark = watched.news(Mark())["mark"]
    log(RunFolder(tmp_path, resume=True, last_step=2), 3)
    news = watched.news(Mark.parse(mark))
    assert news["reset"]
    assert [sample["step"] for sample in news["samples"]] == [3, 2, 1]
    assert [record["step"] for record in merge_steps(RunFiles(tmp_path).read_metrics())] == [1, 2, 3]


def test_the_age_is_that_of_the_last_step(tmp_path):
    log(RunFolder(tmp_path), 1)
    logged = RunFiles(tmp_path).read_metrics()[0]["time"]
    assert WatchedRun(tmp_path, share=1, clock=lambda: logged + 12.34).news(Mark())["age"] == 12.3


def test_drawing_takes_no_more_than_its_share(tmp_path):
    run = RunFolder(tmp_path)
    log(run, 1)
    watched = WatchedRun(tmp_path, share=1e-6)
    first = watched.news(Mark())
    log(run, 2)
    assert watched.news(Mark.parse(first["mark"]))["mark"] == first["mark"]


@pytest.mark.parametrize("text", ["", "1-2", "1-2-x", "-1-2-3", "1-2-3-4", "9" * 30 + "-1-1", "²-1-1"])
def test_what_is_no_mark_has_seen_nothing(text):
    assert Mark.parse(text) == Mark()


def test_a_mark_survives_its_way():
    assert Mark.parse(str(Mark(3, 12345, 7))) == Mark(3, 12345, 7)


# The server


@contextmanager
def serving(folder):
    with make_server(WatchedRun(folder, share=1)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(10)


def get(port, path, host=None, method="GET"):
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=20)
    try:
        connection.request(method, path, headers={"Host": host or f"{LOOPBACK}:{port}"})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_the_server_gives_the_page_and_its_news_and_nothing_else(tmp_path):
    run = RunFolder(tmp_path)
    log(run, 1)
    (tmp_path / "secret.txt").write_text("secret")
    with serving(tmp_path) as port:
        status, headers, html = get(port, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "connect-src &#39;self&#39;" in html
        mark = re.search(r'"mark":"([\d-]+)"', html).group(1)
        log(run, 2)
        status, headers, body = get(port, f"/api/run?after={mark}")
        news = json.loads(body)
        assert (status, headers["Content-Type"], headers["Cache-Control"]) == (
            200,
            "application/json; charset=utf-8",
            "no-store",
        )
        assert [sample["step"] for sample in news["samples"]] == [2]
        for path in ("/secret.txt", "/../secret.txt", "/api", "//etc/passwd"):
            assert get(port, path)[0] == 404
        assert get(port, "/", method="POST")[0] == 501


def test_other_names_are_refused(tmp_path):
    # A web page that makes its own name point to this machine must not read the run.
    with serving(tmp_path) as port:
        assert get(port, "/", host=f"localhost:{port}")[0] == 200
        assert get(port, "/api/run", host="evil.example:80")[0] == 403
        assert get(port, "/", host="evil.example")[0] == 403


def raw(port, *parts, pause=0.0):
    """What comes back for these bytes, until the server closes."""
    found = b""
    with socket.create_connection((LOOPBACK, port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            while part := connection.recv(65536):
                found += part
        except ConnectionError:
            pass
    return found.split(b"\r\n")[0]


def test_pages_of_other_sites_are_refused(tmp_path):
    with serving(tmp_path) as port:
        head = f"GET /api/run HTTP/1.1\r\nHost: localhost:{port}\r\nOrigin: ".encode()
        assert b" 403 " in raw(port, head + b"https://evil.example\r\n\r\n")
        assert b" 403 " in raw(port, head + b"null\r\n\r\n")
        assert b" 200 " in raw(port, head + f"http://localhost:{port}\r\n\r\n".encode())
        assert b" 403 " in raw(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 403 " in raw(port, b"GET / HTTP/1.1\r\n\r\n")


def test_heads_are_bounded_in_bytes_number_and_time(tmp_path, monkeypatch):
    with serving(tmp_path) as port:
        start = f"GET /api/run HTTP/1.1\r\nHost: localhost:{port}\r\n".encode()
        assert b" 200 " in raw(port, start + b"X: " + b"y" * 60_000 + b"\r\n\r\n")
        assert b" 431 " in raw(port, start + b"X: " + b"y" * 40_000 + b"\r\nY: " + b"y" * 40_000 + b"\r\n\r\n")
        assert b" 431 " in raw(port, start + b"X: y\r\n" * 101 + b"\r\n")
        assert b" 431 " in raw(port, b"GET /" + b"y" * 70_000)
    monkeypatch.setattr(live_report._Handler, "timeout", 0.3)
    with serving(tmp_path) as port:
        started = time.monotonic()
        assert (
            raw(port, *(bytes([b]) for b in start + b"X: " + b"y" * 900), pause=0.01) == b""
        )  # never silent, and late
        assert time.monotonic() - started < 8
        assert get(port, "/api/run")[0] == 200


def test_it_listens_on_the_loopback_address_only_and_says_when_it_cannot(tmp_path):
    with make_server(WatchedRun(tmp_path, share=1)) as server:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(ValueError, match=r"--port"):
            make_server(WatchedRun(tmp_path, share=1), server.server_port)
    with pytest.raises(ValueError, match=r"--port"):
        make_server(WatchedRun(tmp_path, share=1), 70_000)


def test_hostile_text_stays_text_in_the_news(tmp_path):
    pages = []
    for name, text in (("tame", "t"), ("wild", HOSTILE)):
        run = RunFolder(tmp_path / name)
        run.write_config({"trainer": {"project_name": text}, "k": text})
        run.append_metrics({"critic/score/mean": 0.5, f"timing_s/{text}": 1.0, f"val-core/{text}/acc/mean@1": 0.5}, 1)
        run.append_generations([{"prompt": text, "response": text, "score": 1.0}], 1)
        news = json.loads(json.dumps(WatchedRun(tmp_path / name, share=1).news(Mark())))
        pages.append(Page("".join(news["sections"].values())))
    assert pages[0].tags == pages[1].tags
    assert not [item for item in pages[1].attributes if item[1].startswith("on")]


def test_many_lookers_at_once_get_the_same(tmp_path):
    run = RunFolder(tmp_path)
    for step in range(1, 20):
        log(run, step)
    with serving(tmp_path) as port:
        found = []
        threads = [threading.Thread(target=lambda: found.append(get(port, "/api/run")[2])) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    marks = {json.loads(body)["mark"] for body in found}
    assert len(found) == 6
    assert len(marks) == 1
