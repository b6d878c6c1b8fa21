#!/usr/bin/env python3
"""`headroom train` on several ranks, started by mpirun or with torchrun's environment variables.

    ranks_test.py PROGRAM mpi|gloo...
"""
import os
import signal
import socket
import subprocess
import sys
import time

from runs import check, history, run_tests

program, ways = sys.argv[1], sys.argv[2:]
NO_RANKS = {name: value for name, value in os.environ.items()
            if not name.startswith(("OMPI_", "PMIX_")) and name not in ("RANK", "WORLD_SIZE")}


def launch(way, ranks, *arguments):
    """Starts a training: the process of mpirun, or one process for each rank."""
    command = [program, "train", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if way == "mpi":
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return [subprocess.Popen(["mpirun", "--oversubscribe", "-n", str(ranks), *command],
                                 env={**NO_RANKS, **root}, **pipes)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [subprocess.Popen(command, env={**NO_RANKS, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                                           "GLOO_SOCKET_IFNAME": "lo"}, **pipes)
            for rank in range(ranks)]


def wait(processes, seconds=120):
    """The exit codes and outputs of processes; those that take longer are killed."""
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append(process.communicate())
    return [process.returncode for process in processes], outputs


def find_processes(part, variable):
    """The processes with `part` on their command line and `variable` in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/environ", "rb") as env:
                if part.encode() in line.read() and variable.encode() in env.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:
            pass
    return found


def wait_until(condition, seconds=60):
    end = time.time() + seconds
    while not condition() and time.time() < end:
        time.sleep(0.05)
    return condition()


def has_steps(folder):
    path = f"{folder}/history.jsonl"
    return os.path.exists(path) and os.path.getsize(path) > 2000


def rank_1_variable(way):
    """The environment variable that marks the process of rank 1."""
    return "OMPI_COMM_WORLD_RANK=1" if way == "mpi" else "RANK=1"


def test_training_on_two_ranks_equals_training_on_one(temp):
    models = {"mlp": [], "gpt": ["--batch", 4, "--context", 16], "field": ["--opt-level", "O2"],
              "lm": ["--batch", 2048], "cnn": ["--batch", 16, "--accumulate", 2]}
    for model, settings in models.items():
        steps = {"mlp": 40}.get(model, 5)
        common = [model, "--precision", "fp16", "--steps", steps, "--clip", 1, *settings]
        losses, scales = {}, {}
        for way in ["alone", *ways]:
            folder = f"{temp}/{model}.{way}"
            if way == "alone":
                one = subprocess.run([program, "train", *map(str, common), "--out", folder,
                                      "--threads", "1"],
                                     env=NO_RANKS, capture_output=True, text=True)
                check(one.returncode == 0, one.stderr)
            else:
                codes, outputs = wait(launch(way, 2, *common, "--out", folder))
                check(not any(codes), f"{model} {way}: {codes} {outputs}")
                printed = "".join(output for output, _ in outputs)
                check(printed.count("steps on 2 ranks") == 1, f"{model} {way}: {printed}")
                check(len(outputs) == 1 or outputs[1] == ("", ""), f"rank 1 is silent: {outputs}")
            end = history(folder)[3]
            losses[way] = [step["loss"] for step in history(folder)[1]] + [end["results"]["final_loss"]]
            scales[way] = end["results"]["final_scale"]
        check(len(set(scales.values())) == 1, f"{model}: {scales}")
        for way in ways:
            # Batch norm uses half of each batch.
            bound = 0.2 if model == "cnn" else 0.01
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses[way], losses["alone"]))
            check(len(losses[way]) == steps + 1 and worst < bound, f"{model} {way}: {worst}")
        if len(ways) == 2:
            check(losses["mpi"] == losses["gloo"], f"{model}: {losses}")


def test_overflow_is_skipped_on_all_ranks(temp):
    for way in ways:
        folder = f"{temp}/{way}.skips"
        codes, outputs = wait(launch(way, 3, "mlp", "--precision", "fp16", "--steps", 12, "--batch", 12,
                                     "--loss-scale", "static:1e30", "--out", folder))
        check(not any(codes), f"{way}: {codes} {outputs}")
        skips = history(folder)[1]
        check(len(skips) == 12 and all(step["overflow"] and step["culprit"].startswith("rank 0: ")
                                       for step in skips), f"{way}: {skips}")


def test_lost_or_stopped_rank_ends_the_others_within_the_time_limit(temp):
    for way in ways:
        for sign in (signal.SIGKILL, signal.SIGSTOP):
            if way == "mpi" and sign == signal.SIGKILL:
                continue  # mpirun itself ends the others
            folder = f"{temp}/{way}.{sign}"
            processes = launch(way, 2, "mlp", "--steps", 10**7, "--out", folder, "--timeout", 5)
            check(wait_until(lambda folder=folder: has_steps(folder)), f"{way} did not start")
            victims = find_processes(folder, rank_1_variable(way))
            check(len(victims) == 1, victims)
            for pid in victims:
                os.kill(pid, sign)
            began = time.time()
            codes, outputs = wait(processes[:1], 60)
            took = time.time() - began
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            wait(processes[1:])
            check(codes[0] == 1, f"{way} {sign}: {codes} {outputs}")
            check("headroom: rank 0: Another rank did not reach the" in outputs[0][1], f"{way}: {outputs}")
            check(took < 60, f"{way} {sign}: {took} s")


def test_resumed_run_on_two_ranks_is_identical(temp):
    for way in ways:
        # Faults are injected on one rank only.
        whole, parts = f"{temp}/{way}.whole", f"{temp}/{way}.parts"
        faulty = ["mlp", "--precision", "fp16", "--schedule", "constant", "--inject", "nan:p=0.2,rank=1"]
        for folder, steps in ((whole, 30), (parts, 15)):
            codes, outputs = wait(launch(way, 2, *faulty, "--steps", steps, "--out", folder))
            check(not any(codes), f"{way}: {codes} {outputs}")
        codes, outputs = wait(launch(way, 3, "mlp", "--out", parts, "--resume", "--steps", 30, "--batch", 12))
        printed = "".join(error for _, error in outputs)
        check(codes[0] == 2 and printed.count("headroom:") == 1, f"{way}: {codes} {outputs}")
        codes, outputs = wait(launch(way, 2, "mlp", "--out", parts, "--resume", "--steps", 30))
        check(not any(codes), f"{way}: {codes} {outputs}")
        check("".join(error for _, error in outputs).count("resuming after step 15") == 1, outputs)
        course = [[(step["loss"], step["scale"], step["overflow"]) for step in history(folder)[1]]
                  for folder in (whole, parts)]
        check(course[0] == course[1] and len(course[0]) == 30, f"{way}: {course}")
        check(0 < sum(step[2] for step in course[0]) < 30, f"{way}: {course}")


def test_all_ranks_escape_to_another_precision_together(temp):
    for way in ways:
        folder = f"{temp}/{way}.escape"
        codes, outputs = wait(launch(way, 2, "mlp", "--precision", "fp16", "--steps", 60, "--out", folder,
                                     "--inject", "nan:step=8-40,rank=1", "--escape", "fp32"))
        check(not any(codes), f"{way}: {codes} {outputs}")
        check("switching from fp16 to fp32" in outputs[0][1] and history(folder)[3]["steps"] == 60, outputs)


def test_signal_to_one_rank_stops_all_after_the_same_step(temp):
    for way in ways:
        folder = f"{temp}/{way}.stopped"
        processes = launch(way, 2, "mlp", "--steps", 10**7, "--out", folder)
        check(wait_until(lambda folder=folder: has_steps(folder)), f"{way} did not start")
        for pid in find_processes(folder, rank_1_variable(way)):
            os.kill(pid, signal.SIGTERM)
        codes, outputs = wait(processes, 60)
        check(all(code == 130 for code in codes), f"{way}: {codes} {outputs}")
        check("stopped by hand" in outputs[0][0], f"{way}: {outputs}")
        check(history(folder)[3] is not None, f"{way}: no end")


def test_invalid_settings_are_reported_once(temp):
    for way in ways:
        codes, outputs = wait(launch(way, 2, "mlp", "--batch", 13))
        printed = "".join(error for _, error in outputs)
        check(codes[0] == 2 and printed.count("with 2 ranks it must be a multiple of 2") == 1, outputs)
        codes, outputs = wait(launch(way, 2, "mlp", "--timeout", "nan"))
        check(codes[0] == 2, outputs)


def test_missing_first_rank_is_reported(temp):
    if "gloo" in ways:
        result = subprocess.run([program, "train", "mlp", "--timeout", "1"], text=True, capture_output=True,
                                env={**NO_RANKS, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                     "MASTER_PORT": "9"})
        check(result.returncode == 1, result)
        check("headroom: rank 1: Another rank did not reach the" in result.stderr, result)


def test_invalid_rank_variables_are_refused(temp):
    for odd, sentence in {"WORLD_SIZE=2": "not all of RANK", "WORLD_SIZE=x": "WORLD_SIZE='x'",
                          "WORLD_SIZE=2 RANK=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1": "rank 2 of 2"}.items():
        result = subprocess.run([program, "train", "mlp", "--steps", "1"], text=True, capture_output=True,
                                env={**NO_RANKS, **dict(pair.split("=") for pair in odd.split())})
        check(result.returncode == 2 and sentence in result.stderr, f"{odd}: {result}")


run_tests(globals())
