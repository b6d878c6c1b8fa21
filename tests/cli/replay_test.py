#!/usr/bin/env python3
"""`headroom replay` as a user runs it."""
import json
import os
import subprocess
import sys
import tempfile

PROGRAM = sys.argv[1]


def run(*arguments, text=""):
    return subprocess.run([PROGRAM, *arguments], input=text, capture_output=True, text=True)


def scales(pattern, key, *arguments):
    result = run("replay", "--json", *arguments, "-", text="\n".join(pattern) + "\n")
    assert result.returncode == 0, result.stderr
    return [json.loads(line)[key] for line in result.stdout.splitlines()]


SHORT = ("--init-scale", "1024", "--growth-interval", "3")

# One object a step, with just these keys.
result = run("replay", "--policy", "torch", *SHORT, "--json", "-", text="1\n0\n")
assert result.stdout.splitlines() == [
    '{"step":1,"overflow":true,"scale_used":1024,"scale":512,"applied":false}',
    '{"step":2,"overflow":false,"scale_used":512,"scale":512,"applied":true}',
], result.stdout

# Every option reaches the policy.
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

# Traces: plain, JSON, comments, blank lines, carriage returns, a file.
mixed = '# a comment\n0\r\n\n{"overflow": true, "loss": null}\n {"overflow":0} \n1'
result = run("replay", "--json", "-", text=mixed)
flags = [json.loads(line)["overflow"] for line in result.stdout.splitlines()]
assert flags == [False, True, False, True], result
with tempfile.NamedTemporaryFile("w", suffix=".trace", delete=False) as file:
    file.write("0\n1\n")
result = run("replay", file.name)
assert result.returncode == 0 and "2 steps, 1 skipped" in result.stdout, result
os.unlink(file.name)

# Where the gradients' size is known, the policy's own scale decides what overflows.
closed = '{"amax": 2.0, "overflow": false}\n' * 3
assert scales(closed.splitlines(), "scale", "--policy", "torch") == [32768, 16384, 16384]
closed = '{"amax": 0.5, "overflow": true, "overflow_at": 32768}\n' * 3
assert scales(closed.splitlines(), "scale", "--policy", "torch") == [32768, 16384, 16384]
assert scales(['{"amax": 2.0}'] * 60, "scale", "--policy", "headroom")[-1] == 16384

# Several policies: one row each, with what FP16 would have lost.
trace = '{"amax": 0.5, "log2": {"-1": 3, "-30": 1, "-45": 4}}\n' * 10
result = run("replay", "--policy", "torch,static,headroom", "--json", "-", text=trace)
rows = [json.loads(line) for line in result.stdout.splitlines()]
assert [row["policy"] for row in rows] == ["torch", "static", "headroom"], result
assert [row["lost"] for row in rows[:2]] == [40, 50 - 10], result
assert rows[0]["values"] == 80 and rows[0]["skipped"] == 0, result
result = run("replay", "--policy", "torch,static", "-", text='{"amax": 0.5, "log2": {"-45": 4}}')
assert result.returncode == 0 and "100.0000 %" in result.stdout, result

# A policy that retries batches skips only what no scale helps, and reports how many passes it took.
burst = ['{"amax": 0.5}'] * 20 + ['{"amax": 40}'] + ['{"amax": 0.5}'] * 2 + ["1", '{"amax": 0.5}']
result = run("replay", "--policy", "torch,headroom-retry", "--json", "-", text="\n".join(burst))
rows = [json.loads(line) for line in result.stdout.splitlines()]
assert [(row["steps"], row["skipped"]) for row in rows] == [(25, 2), (25, 1)], result
assert rows[0]["retries"] == 0 and 3 < rows[1]["retries"] < 16, result
numbers = scales(burst, "step", "--policy", "headroom-retry")
assert numbers[19:23] == [20, 21, 21, 21] and numbers[-1] == 25, numbers
used = scales(burst, "scale_used", "--policy", "headroom-retry")
assert used[20] > used[21] > used[22], "the same batch at lower and lower scales"
result = run("replay", "--policy", "headroom-retry", "-", text="\n".join(burst))
assert f"25 steps, 1 skipped (4.00 %), {rows[1]['retries']} retries" in result.stdout, result
assert result.stdout.count("overflow, retried") == rows[1]["retries"], result

result = run("replay", "--policy", "headroom-retry", "-", text="1\n" * 20)
assert "raised an alarm" in result.stderr, result
assert 20 < result.stdout.count("overflow, retried") <= 140, result
passes = run("replay", "--policy", "headroom-retry", "--json", "-", text="\n".join(burst)).stdout
assert "25 steps, 1 skipped" in run("replay", "--policy", "torch", "-", text=passes).stdout, passes

# A gradient of 0 is one; numbers that no run has do not run over.
assert scales(['{"amax": 0}'] * 3, "overflow") == [False] * 3
much = '{"amax": 0.5, "log2": {"-90": 281474976710656, "-1": 1}}\n' * 40000
result = run("replay", "--policy", "torch,static", "--json", "-", text=much)
assert [json.loads(line)["lost"] for line in result.stdout.splitlines()] == [2**63 - 1] * 2, result
for scale, start, counts in ((0, 1, [1]), (1, 2**31 - 1, [1, 1]), (1, 0, [2**63 - 1] * 2), (1, 0, [-1])):
    text = json.dumps({"format": "headroom-history", "version": 1}) + "\n"
    text += json.dumps({"step": 1, "scale": scale, "layers": [{"from": start, "histogram": counts}]})
    result = run("replay", "-", text=text + '\n{"step": 1, "amax": 1.0, "overflow": false}\n')
    assert result.returncode == 0 and ("0.0000 %" in result.stdout or "lost" not in result.stdout), result

# The last line of a history may be cut off, as that of a run that was killed; no other line, and of no other trace.
header = '{"format": "headroom-history", "version": 1}\n'
line = '{"step": 1, "amax": 1.0, "overflow": false}'
result = run("replay", "-", text=header + line + "\n" + line[:20])
assert result.returncode == 0 and "1 steps" in result.stdout and "incomplete" in result.stderr, result
result = run("replay", "-", text=header + line)
assert result.returncode == 0 and "1 steps" in result.stdout and not result.stderr, result
for text in (header + line[:20] + "\n" + line, header + line[:20] + "\n", line + "\n" + line[:20]):
    assert run("replay", "-", text=text).returncode == 2, text

# What cannot be used: one sentence, the line's number, exit 2, nothing on standard output.
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
                   ("0\n" + json.dumps({"overflow": 0} | {str(i): 0 for i in range(4096)}), ":2: this line has an object"),
                   ("0\n" + "x" * (2**26 + 1), ":2: this line is longer than 64 MiB")):
    result = run("replay", "--json", "-", text=text)
    assert result.returncode == 2, (text, result)
    assert part in result.stderr and result.stdout == "", (text, result)
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

# A collapse is told, and does not disturb the numbers.
result = run("replay", "--policy", "tf-keras", "--init-scale", "2", "--json", "-", text="1\n" * 4)
assert [json.loads(line)["scale"] for line in result.stdout.splitlines()] == [1, 1, 1, 1]
assert "3 steps from step 2 on raised an alarm" in result.stderr, result.stderr
print("1 passed, 0 failed")
