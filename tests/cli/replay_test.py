#!/usr/bin/env python3
"""`headroom replay`: policies and their options, traces, retries, histories and errors."""
import json
import os
import subprocess
import sys
import tempfile

from runs import run_tests

PROGRAM = sys.argv[1]


def run(*arguments, text=""):
    return subprocess.run([PROGRAM, *arguments], input=text, capture_output=True, text=True)


def scales(pattern, key, *arguments):
    result = run("replay", "--json", *arguments, "-", text="\n".join(pattern) + "\n")
    assert result.returncode == 0, result.stderr
    return [json.loads(line)[key] for line in result.stdout.splitlines()]


SHORT = ("--init-scale", "1024", "--growth-interval", "3")


def test_json_has_one_object_per_step():
    result = run("replay", "--policy", "torch", *SHORT, "--json", "-", text="1\n0\n")
    assert result.stdout.splitlines() == [
        '{"step":1,"overflow":true,"scale_used":1024,"scale":512,"applied":false}',
        '{"step":2,"overflow":false,"scale_used":512,"scale":512,"applied":true}',
    ], result.stdout


def test_options_reach_the_policy():
    storm = "111000010100"
    assert scales(storm, "scale", "--policy", "megatron", *SHORT) == [
        1024, 512, 256, 256, 256, 512, 512, 512, 512, 256, 256, 256]
    assert scales(storm, "scale_used", "--policy", "mxnet", *SHORT) == [
        1024, 1024, 512, 256, 128, 128, 128, 256, 256, 128, 128, 64]
    assert scales(storm, "scale", "--policy", "paddle", "--hysteresis", "2", *SHORT)[2] == 512
    assert scales("000000010011", "scale", "--policy", "fairseq", "--init-scale", "1024",
                  "--growth-interval", "100", "--tolerance", "0.25")[-2:] == [1024, 512]
    assert scales("0000", "scale", "--growth-interval", "1", "--growth-factor", "4",
                  "--init-scale", "1", "--max-scale", "32") == [4, 16, 32, 32]
    assert scales("111", "scale", "--backoff-factor", "0.25", "--init-scale", "64",
                  "--min-scale", "2") == [16, 4, 2]


def test_traces_may_be_plain_or_json():
    mixed = '# a comment\n0\r\n\n{"overflow": true, "loss": null}\n {"overflow":0} \n1'
    result = run("replay", "--json", "-", text=mixed)
    flags = [json.loads(line)["overflow"] for line in result.stdout.splitlines()]
    assert flags == [False, True, False, True], result
    with tempfile.NamedTemporaryFile("w", suffix=".trace", delete=False) as file:
        file.write("0\n1\n")
    result = run("replay", file.name)
    assert result.returncode == 0 and "2 steps, 1 skipped" in result.stdout, result
    os.unlink(file.name)


def test_overflow_is_decided_by_amax_and_the_replayed_scale():
    closed = '{"amax": 2.0, "overflow": false}\n' * 3
    assert scales(closed.splitlines(), "scale", "--policy", "torch") == [32768, 16384, 16384]
    closed = '{"amax": 0.5, "overflow": true, "overflow_at": 32768}\n' * 3
    assert scales(closed.splitlines(), "scale", "--policy", "torch") == [32768, 16384, 16384]
    assert scales(['{"amax": 2.0}'] * 60, "scale", "--policy", "headroom")[-1] == 16384


def test_several_policies_are_compared_with_their_losses():
    trace = '{"amax": 0.5, "log2": {"-1": 3, "-30": 1, "-45": 4}}\n' * 10
    result = run("replay", "--policy", "torch,static,headroom", "--json", "-", text=trace)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["policy"] for row in rows] == ["torch", "static", "headroom"], result
    assert [row["lost"] for row in rows[:2]] == [40, 50 - 10], result
    assert rows[0]["values"] == 80 and rows[0]["skipped"] == 0, result
    result = run("replay", "--policy", "torch,static", "-", text='{"amax": 0.5, "log2": {"-45": 4}}')
    assert result.returncode == 0 and "100.0000 %" in result.stdout, result


def test_retrying_policy_skips_only_batches_that_fit_no_scale():
    burst = ['{"amax": 0.5}'] * 20 + ['{"amax": 40}'] + ['{"amax": 0.5}'] * 2 + ["1", '{"amax": 0.5}']
    result = run("replay", "--policy", "torch,headroom-retry", "--json", "-", text="\n".join(burst))
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["steps"], row["skipped"]) for row in rows] == [(25, 2), (25, 1)], result
    assert rows[0]["retries"] == 0 and 3 < rows[1]["retries"] < 16, result
    numbers = scales(burst, "step", "--policy", "headroom-retry")
    assert numbers[19:23] == [20, 21, 21, 21] and numbers[-1] == 25, numbers
    used = scales(burst, "scale_used", "--policy", "headroom-retry")
    assert used[20] > used[21] > used[22], "retries of a batch have decreasing scales"
    result = run("replay", "--policy", "headroom-retry", "-", text="\n".join(burst))
    assert f"25 steps, 1 skipped (4.00 %), {rows[1]['retries']} retries" in result.stdout, result
    assert result.stdout.count("overflow, retried") == rows[1]["retries"], result

    result = run("replay", "--policy", "headroom-retry", "-", text="1\n" * 20)
    assert "raised an alarm" in result.stderr, result
    assert 20 < result.stdout.count("overflow, retried") <= 140, result
    passes = run("replay", "--policy", "headroom-retry", "--json", "-", text="\n".join(burst)).stdout
    assert "25 steps, 1 skipped" in run("replay", "--policy", "torch", "-", text=passes).stdout, passes


def test_zero_gradients_and_huge_counts_are_handled():
    # Counts saturate instead of wrapping around.
    assert scales(['{"amax": 0}'] * 3, "overflow") == [False] * 3
    much = '{"amax": 0.5, "log2": {"-90": 281474976710656, "-1": 1}}\n' * 40000
    result = run("replay", "--policy", "torch,static", "--json", "-", text=much)
    assert [json.loads(line)["lost"] for line in result.stdout.splitlines()] == [2**63 - 1] * 2, result
    for scale, start, counts in ((0, 1, [1]), (1, 2**31 - 1, [1, 1]), (1, 0, [2**63 - 1] * 2), (1, 0, [-1])):
        text = json.dumps({"format": "headroom-history", "version": 1}) + "\n"
        text += json.dumps({"step": 1, "scale": scale, "layers": [{"from": start, "histogram": counts}]})
        result = run("replay", "-", text=text + '\n{"step": 1, "amax": 1.0, "overflow": false}\n')
        assert result.returncode == 0 and ("0.0000 %" in result.stdout or "lost" not in result.stdout), result


def test_only_the_last_line_of_a_history_may_be_incomplete():
    header = '{"format": "headroom-history", "version": 1}\n'
    line = '{"step": 1, "amax": 1.0, "overflow": false}'
    result = run("replay", "-", text=header + line + "\n" + line[:20])
    assert result.returncode == 0 and "1 steps" in result.stdout and "incomplete" in result.stderr, result
    result = run("replay", "-", text=header + line)
    assert result.returncode == 0 and "1 steps" in result.stdout and not result.stderr, result
    for text in (header + line[:20] + "\n" + line, header + line[:20] + "\n", line + "\n" + line[:20]):
        assert run("replay", "-", text=text).returncode == 2, text


def test_invalid_traces_are_refused_with_the_line_number():
    for text, part in (("0\n2\n", ":2:"), ("0\nyes\n", ":2:"), ('{"over": 1}\n', "no \"overflow\""),
                       ('{"overflow": 3}\n', "true, false"), ("[1]\n", ":1:"), ("0\n{\n", ":2:"),
                       ("\x00\xff\n", ":1:"), ("", "no steps"), ('{"amax": -1}', "\"amax\""),
                       ('{"amax": "big"}', "\"amax\""), ('{"amax": 1e999}', ":1:"),
                       ('{"amax": 1, "overflow_at": []}', "\"overflow_at\""),
                       ('{"amax": 1, "log2": [1]}', "\"log2\""),
                       ('{"amax": 1, "log2": {"x": 1}}', "\"log2\""),
                       ('{"amax": 1, "log2": {"-3": -1}}', "\"log2\""),
                       ('{"amax": 1, "log2": {"-3": 1.5}}', "\"log2\""),
                       ('{"amax": 1, "log2": {"-3": 1e300}}', "\"log2\""),
                       ("0\n" + json.dumps({"overflow": 0} | {str(i): 0 for i in range(4096)}),
                        ":2: this line has an object"),
                       ("0\n" + "x" * (2**26 + 1), ":2: this line is longer than 64 MiB")):
        result = run("replay", "--json", "-", text=text)
        assert result.returncode == 2, (text, result)
        assert part in result.stderr and result.stdout == "", (text, result)


def test_invalid_arguments_are_refused():
    for arguments in (("--policy", "nonsense", "-"),
                      ("--policy", "torch,nonsense", "-"),
                      ("--policy", "headroom", "--init-scale", "1000", "-"), ("--init-scale", "0", "-"),
                      ("--init-scale", "nan", "-"), ("--growth-factor", "1", "-"),
                      ("--backoff-factor", "inf", "-"), ("--hysteresis", "0", "-"),
                      ("--tolerance", "2", "-"), ("--min-scale", "-1", "-"), ("/no/such/file",), (),
                      ("--growth-interval", "3.5", "-"), ("--growth-interval", "99999999999", "-"),
                      (os.path.dirname(os.path.abspath(__file__)),)):
        result = run("replay", *arguments, text="0\n")
        assert result.returncode == 2 and result.stderr and not result.stdout, (arguments, result)
    result = run("replay", "--policy", "headroom", "--init-scale", "1000", "-", text="0\n")
    assert "init_scale is 1000; it has to be a power of two" in result.stderr, result
    assert run().returncode == 2
    assert run("--help").returncode == 0
    assert "headroom 0." in run("--version").stdout


def test_collapse_of_the_scale_is_reported_on_standard_error():
    result = run("replay", "--policy", "tf-keras", "--init-scale", "2", "--json", "-", text="1\n" * 4)
    assert [json.loads(line)["scale"] for line in result.stdout.splitlines()] == [1, 1, 1, 1]
    assert "3 steps from step 2 on raised an alarm" in result.stderr, result.stderr


run_tests(globals())
