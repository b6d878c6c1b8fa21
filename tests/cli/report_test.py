#!/usr/bin/env python3
"""report_test.py PROGRAM MAKE_RUN: `headroom report`, its live server and TensorBoard event files."""
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import chromium
import tfevents
from runs import check, history, run_tests

program, make_run = sys.argv[1], sys.argv[2]
EVIL = "</script><img src=x onerror=alert(1)>\"'\u20ac"


def report(*arguments):
    return subprocess.run([program, "report", *arguments], capture_output=True, text=True)


def make_history(folder, steps, delay=0):
    """Records a run with make_run: every tenth step is skipped, layers are recorded in every fifth."""
    subprocess.run([make_run, folder, str(steps), str(delay)], check=True)


def expect_refused(part, *arguments):
    result = report(*arguments)
    check(result.returncode == 2 and part in result.stderr and result.stderr.count("\n") == 1,
          f"{arguments}: {result.returncode} {result.stderr}")


def report_data(path):
    """The JSON embedded in a report."""
    with open(path) as file:
        return json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', file.read(), re.S).group(1))


def test_event_file_agrees_with_the_history(temp):
    folder = f"{temp}/run"
    make_history(folder, 40)
    found = tfevents.read(f"{folder}/events.out.tfevents.headroom")
    _, steps, layers, _ = history(folder)
    for tag, key in (("train/loss", "loss"), ("scaler/scale", "scale"), ("train/grad_norm", "grad_norm"),
                     ("train/lr", "lr")):
        written = {step: value for step, name, value in found if name == tag}
        check(len(written) == len(steps), tag)
        check(all(abs(written[step["step"]] - step[key]) <= 1e-6 * abs(step[key]) for step in steps), tag)
    check({value for _, name, value in found if name == "scaler/log2_scale"} == {3.0}, "log2 of the scale")
    skipped = [value for _, name, value in found if name == "scaler/skipped"]
    check(skipped[-1] == sum(step["overflow"] for step in steps) and sorted(skipped) == skipped, "skipped")
    histograms = {(step, name): value for step, name, value in found if name.startswith("grad_log2/")}
    check(len(histograms) == sum(len(record["layers"]) for record in layers), "histograms")
    one = histograms[(5, "grad_log2/layer.weight")]
    check(one["num"] == 4 and one["min"] == -30 and one["max"] == 1, one)
    check(one["limits"] == list(range(-30, 2)) and len(one["counts"]) == len(one["limits"]), one)
    check({limit: n for limit, n in zip(one["limits"], one["counts"]) if n} == {-29: 1, -19: 1, 1: 2}, one)
    check((5, "grad_log2/" + EVIL) in histograms, "names are unchanged")
    shares = {(step, name): value for step, name, value in found if name.startswith("underflow_")}
    check(len(shares) == 2 * len(histograms), "shares")
    check(shares[5, "underflow_lost/layer.weight"] == shares[40, "underflow_subnormal/layer.weight"] == 0.25, shares)
    check(shares[40, "underflow_lost/" + EVIL] == 0, shares)
    left = [value for _, name, value in found if name == "scaler/doublings_left"]
    check(len(left) == len(layers) and abs(left[0] - layers[0]["doublings_left"]) < 1e-6, left)
    # Settings and results for the HParams plugin: first and last.
    check(found[0] == (None, "_hparams_/session_start_info",
                       {"optimizer": "adam, \u20ac", "rate": 0.25, "scale_policy": "dynamic"}), found[0])
    check((40, "results/accuracy", 0.75) in found, found[-3:])
    check(found[-1][1:] == ("_hparams_/session_end_info", 1), found[-1])


def test_event_file_of_a_killed_run_has_settings_and_no_end(temp):
    process = subprocess.Popen([make_run, f"{temp}/killed", "100000", "1"])
    wait_for_steps(f"{temp}/killed")
    process.kill()
    process.wait()
    with open(f"{temp}/killed/events.out.tfevents.headroom", "rb") as file:
        tags = re.findall(rb"_hparams_/session_\w+_info", file.read())
    check(tags == [b"_hparams_/session_start_info"], tags)


def check_in_browser(path):
    """The page draws its charts without console messages, and hostile names stay text."""
    if chromium.missing():
        return
    with chromium.Browser() as browser:
        browser.open(path)
        dom = browser.run("document.documentElement.outerHTML")
        problems = browser.problems()
    check(not problems, problems)
    check(dom.count("<svg") >= 4 and "<canvas" in dom, f"the charts of {path}: {dom[-3000:]}")
    check("Gradients by layer" in dom and "layer.weight" in dom, "the layers are shown")
    check("<img" not in dom.replace(dom[dom.find('id="data"'):dom.find("</script>")], ""), "a name became a tag")


def get(url, **options):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, **options), timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, "", error.headers


def wait_for_steps(folder):
    """Waits until a run has recorded some steps, for up to a minute on a busy machine."""
    path, end = f"{folder}/history.jsonl", time.time() + 60
    while time.time() < end and not (os.path.exists(path) and os.path.getsize(path) > 10_000):
        time.sleep(0.05)


def send_raw(port, data):
    """Sends bytes to the server and returns its whole answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(data)
        answer = b""
        while part := client.recv(65536):
            answer += part
        return answer


@contextlib.contextmanager
def live_report(folder, *arguments):
    """Serves a live report: its port and address, or None for both if it does not start."""
    server = subprocess.Popen([program, "report", folder, "--watch", *arguments], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
    try:
        url = re.search(r"http://127\.0\.0\.1:(\d+)/", server.stdout.readline())
        yield (int(url.group(1)), url.group(0)) if url else (None, None)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def test_live_report_follows_a_growing_run(temp):
    make_history(f"{temp}/run", 40)
    with open(f"{temp}/run/history.jsonl", "rb") as file:
        recorded = file.read()
    os.mkdir(f"{temp}/live")
    growing = open(f"{temp}/live/history.jsonl", "wb")

    def grow_to(share):  # share of the recorded bytes, which may end within a line
        growing.write(recorded[growing.tell():int(share * len(recorded))])
        growing.flush()

    grow_to(0.4)
    with growing, live_report(f"{temp}/live") as (port, url):
        # Clients that send nothing, nonsense or too much do not block others, however many they are.
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(70)]
        idle[-1].sendall(b"GET / HT")
        status, page, _ = get(url)
        check(status == 200 and 'data-live="1"' in page, "the page")
        check(b" 400 " in send_raw(port, b"nonsense\r\n\r\n"), "nonsense")
        check(b" 431 " in send_raw(port, b"GET / HTTP/1.1\r\nX: " + b"x" * 9000), "too much")
        check(b" 403 " in send_raw(port, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"), "another host")
        check(b" 403 " in send_raw(port, b"GET / HTTP/1.1\r\n\r\n"), "no host")
        check(b" 403 " in send_raw(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "another port")
        check(b" 200 " in send_raw(port, b"GET / HTTP/1.1\r\nHost: LocalHost:%d\r\n\r\n" % port), "a host in any case")
        check(get(url, method="POST", data=b"x")[0] == 405, "POST")
        for path in ("history.jsonl", "../../etc/passwd", "%2e%2e/x", "data/x"):
            check(get(url + path)[0] == 404, path)
        expect_refused("cannot be used", f"{temp}/live", "--watch", "--port", str(port))
        # The data grow with the run, and unchanged data are not sent again.
        counts, lines = [], -1
        for share in (0.5, 0.7, 0.9, 1):
            grow_to(share)
            status, body, headers = get(f"{url}data?lines={lines}")
            check(status == 200 and int(headers["X-Lines"]) > lines, (status, lines))
            lines = int(headers["X-Lines"])
            run = json.loads(body)["runs"][0]
            counts.append(run["count"])
            check((run["end"] == "finished") == (share == 1), run["end"])
            check(get(f"{url}data?lines={lines}")[0] == 204, "nothing new")
        check(len(set(counts)) == 4 and counts == sorted(counts) and counts[-1] == 40, counts)
        # Every request reports the damage.
        growing.write(b"garbage\n")
        growing.flush()
        check([get(url)[0] for _ in range(3)] == [500] * 3, "damage is reported each time")
        for client in idle:
            client.close()


def test_port_80_accepts_hosts_without_a_port(temp):
    # Browsers leave out the default port.
    make_history(f"{temp}/run", 3)
    with live_report(f"{temp}/run", "--port", "80") as (port, url):
        if port is None:
            print("skipped: port 80 is not available")
            return
        for host in (b"127.0.0.1", b"localhost", b"localhost:80"):
            check(b" 200 " in send_raw(port, b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"), host)
        check(b" 403 " in send_raw(port, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"), "another host")


def test_live_report_follows_runs_that_are_added_replaced_and_removed(temp):
    folder = f"{temp}/runs"
    make_history(f"{folder}/b", 3)
    with live_report(folder) as (_, url):
        def names(body):
            return [run["place"] for run in json.loads(body)["runs"]]

        def request(lines):
            status, body, headers = get(f"{url}data?lines={lines}")
            return status, names(body) if status == 200 else None, headers["X-Lines"]

        _, first, lines = request(-1)
        make_history(f"{folder}/a", 3)
        page = get(url)[1]
        data = re.search(r'id="data"[^>]*>(.*?)</script>', page, re.S).group(1)
        check(first == ["b"] and names(data) == ["a", "b"], "a run that started later")
        status, both, lines = request(lines)
        check(status == 200 and both == ["a", "b"], "an open page gets the new run")
        # Another run with the same number of lines.
        make_history(f"{folder}/b", 3)
        status, _, lines = request(lines)
        check(status == 200, "a run that was replaced")
        check(request(lines)[0] == 204, "nothing new")
        shutil.rmtree(f"{folder}/b")
        get(url)
        status, rest, lines = request(lines)
        check(status == 200 and rest == ["a"], "a run that was removed")
        check(request(lines)[0] == 204, "nothing new")


def test_report_contains_the_run(temp):
    make_history(f"{temp}/run", 40)
    result = report(f"{temp}/run")
    check(result.returncode == 0 and "run/report.html" in result.stderr, result.stderr)
    run = report_data(f"{temp}/run/report.html")["runs"][0]
    check(run["count"] == 40 and run["skipped"] == 4 and len(run["skips"]) == 4, run["skips"])
    check(run["skips"][0] == [10, 8, EVIL + ": 1 inf, 0 nan"], run["skips"])
    check(run["layers"][0]["name"] == "layer.weight" and run["layers"][0]["lost"] == 0.25, run["layers"])
    check(run["bounds"]["overflow"] == EVIL and run["bounds"]["underflow"] == "layer.weight", run["bounds"])
    check_in_browser(f"{temp}/run/report.html")
    # A history can be replayed.
    result = subprocess.run([program, "replay", "--json", f"{temp}/run/history.jsonl"], capture_output=True, text=True)
    skips = [json.loads(line)["overflow"] for line in result.stdout.splitlines()]
    check(len(skips) == 40 and sum(skips) == 4, result.stderr)


def test_report_of_a_folder_contains_all_runs(temp):
    make_history(f"{temp}/run", 40)
    make_history(f"{temp}/run2", 3)
    check(report(temp, "--out", f"{temp}/all.html").returncode == 0, "a folder of runs")
    check(len(report_data(f"{temp}/all.html")["runs"]) == 2, "both runs")
    check_in_browser(f"{temp}/all.html")


def test_report_of_a_killed_run_has_its_steps(temp):
    process = subprocess.Popen([make_run, f"{temp}/killed", "100000", "1"])
    wait_for_steps(f"{temp}/killed")
    process.kill()
    process.wait()
    check(report(f"{temp}/killed").returncode == 0, "a killed run")
    run = report_data(f"{temp}/killed/report.html")["runs"][0]
    check(run["count"] > 10 and run["end"] == "", run["count"])


def test_second_writer_of_a_folder_is_refused(temp):
    process = subprocess.Popen([make_run, f"{temp}/busy", "100000", "1"])
    wait_for_steps(f"{temp}/busy")
    second = subprocess.run([make_run, f"{temp}/busy", "5", "0"], capture_output=True, text=True)
    check(second.returncode == 1 and "another run" in second.stderr, second.stderr)
    process.kill()
    process.wait()
    check(len(history(f"{temp}/busy")[1]) > 10, "the first run continues")


def test_missing_runs_and_unwritable_paths_are_refused(temp):
    make_history(f"{temp}/run", 3)
    os.mkdir(f"{temp}/empty")
    expect_refused("There is no run", f"{temp}/empty")
    expect_refused("There is no folder", f"{temp}/nowhere")
    expect_refused("could not be written", f"{temp}/run", "--out", "/proc/report.html")
    expect_refused("the disk is full", f"{temp}/run", "--out", "/dev/full")
    expect_refused("the name of a history", f"{temp}/run", "--out", f"{temp}/run/history.jsonl")


def test_damaged_run_is_refused_alone_and_omitted_among_others(temp):
    make_history(f"{temp}/run", 40)
    with open(f"{temp}/run/history.jsonl") as file:
        lines = file.readlines()
    lines[6] = lines[6][:20] + "\n"
    os.mkdir(f"{temp}/damaged")
    with open(f"{temp}/damaged/history.jsonl", "w") as file:
        file.writelines(lines)
    expect_refused("history.jsonl:7: ", f"{temp}/damaged")
    check(not os.path.exists(f"{temp}/damaged/report.html"), "no report of a damaged run")
    shutil.copytree(f"{temp}/run", f"{temp}/damaged/other")
    os.makedirs(f"{temp}/damaged/bad")
    os.rename(f"{temp}/damaged/history.jsonl", f"{temp}/damaged/bad/history.jsonl")
    result = report(f"{temp}/damaged")
    check(result.returncode == 0 and "bad/history.jsonl:7: " in result.stderr and "It is left out." in result.stderr,
          result)
    data = report_data(f"{temp}/damaged/report.html")
    check(len(data["runs"]) == 1 and "history.jsonl:7: " in data["left_out"][0], data["left_out"])
    check_in_browser(f"{temp}/damaged/report.html")


def test_control_characters_in_error_messages_are_replaced(temp):
    make_history(f"{temp}/run", 3)
    with open(f"{temp}/run/history.jsonl") as file:
        lines = file.readlines()
    evil = "\x1b]0;x\x07\u009b\u202e\nheadroom: fake"
    os.mkdir(f"{temp}/{evil}")
    header = json.loads(lines[0])
    header["settings"] = {evil: 5}
    with open(f"{temp}/{evil}/history.jsonl", "w") as file:
        file.write(json.dumps(header) + "\n")
    result = report(f"{temp}/{evil}")
    check(result.returncode == 2 and result.stderr.count("?]0;x??? headroom: fake") == 2
          and result.stderr.count("\n") == 1 and not set(evil[:-15]) & set(result.stderr) - set("]0;x"), result.stderr)


run_tests(globals())
