#!/usr/bin/env python3
"""`headroom train` on several ranks, under mpirun and with torchrun's variables.

    ranks_test.py PROGRAM mpi|gloo...
"""
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

from runs import check, finish, history

program, ways = sys.argv[1], sys.argv[2:]
NO_RANKS = {name: value for name, value in os.environ.items()
            if not name.startswith(("OMPI_", "PMIX_")) and name not in ("RANK", "WORLD_SIZE")}


def launch(way, ranks, *arguments):
    """One process of mpirun's, or one for each rank."""
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
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append(process.communicate())
    return [process.returncode for process in processes], outputs


def pids(part, variable):
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


def until(condition, seconds=60):
    end = time.time() + seconds
    while not condition() and time.time() < end:
        time.sleep(0.05)
    return condition()


def grown(folder):
    path = f"{folder}/history.jsonl"
    return os.path.exists(path) and os.path.getsize(path) > 2000


with tempfile.TemporaryDirectory() as temp:
    # Averaged over ranks or not, and over either way: the same training.
    models: dict[str, list] = {"mlp": [], "gpt": ["--batch", 4, "--context", 16],
                               "field": ["--opt-level", "O2"], "lm": ["--batch", 2048],
                               "cnn": ["--batch", 16, "--accumulate", 2]}
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
                told = "".join(output for output, _ in outputs)
                check(told.count("steps on 2 ranks") == 1, f"{model} {way}: {told}")
                check(len(outputs) == 1 or outputs[1] == ("", ""), f"rank 1 is silent: {outputs}")
            end = history(folder)[3]
            losses[way] = [step["loss"] for step in history(folder)[1]] + [end["results"]["final_loss"]]
            scales[way] = end["results"]["final_scale"]
        check(len(set(scales.values())) == 1, f"{model}: {scales}")
        for way in ways:
            # Batch norm sees half the batch.
            bound = 0.2 if model == "cnn" else 0.01
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses[way], losses["alone"]))
            check(len(losses[way]) == steps + 1 and worst < bound, f"{model} {way}: {worst}")
        if len(ways) == 2:
            check(losses["mpi"] == losses["gloo"], f"{model}: {losses}")

    for way in ways:
        variable = "OMPI_COMM_WORLD_RANK=1" if way == "mpi" else "RANK=1"
        # Gradients of 3 ranks that overflow: all skip alike, and the reason is told.
        folder = f"{temp}/{way}.skips"
        codes, outputs = wait(launch(way, 3, "mlp", "--precision", "fp16", "--steps", 12, "--batch", 12,
                                     "--loss-scale", "static:1e30", "--out", folder))
        check(not any(codes), f"{way}: {codes} {outputs}")
        skips = history(folder)[1]
        check(len(skips) == 12 and all(step["overflow"] and step["culprit"].startswith("rank 0: ")
                                       for step in skips), f"{way}: {skips}")

        # A rank that is gone, or hangs: the others say so and end, in time, with 1.
        for sign in (signal.SIGKILL, signal.SIGSTOP):
            if way == "mpi" and sign == signal.SIGKILL:
                continue  # mpirun ends the others itself
            folder = f"{temp}/{way}.{sign}"
            processes = launch(way, 2, "mlp", "--steps", 10**7, "--out", folder, "--timeout", 5)
            check(until(lambda folder=folder: grown(folder)), f"{way} has begun")
            victims = pids(folder, variable)
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
            check("headroom: rank 0: Another rank did not come" in outputs[0][1], f"{way}: {outputs}")
            check(took < 60, f"{way} {sign}: {took} s")

        # Faults in one rank only, and a run that goes on: all ranks as if it had never ended.
        whole, parts = f"{temp}/{way}.whole", f"{temp}/{way}.parts"
        faulty = ["mlp", "--precision", "fp16", "--schedule", "constant", "--inject", "nan:p=0.2,rank=1"]
        for folder, steps in ((whole, 30), (parts, 15)):
            codes, outputs = wait(launch(way, 2, *faulty, "--steps", steps, "--out", folder))
            check(not any(codes), f"{way}: {codes} {outputs}")
        codes, outputs = wait(launch(way, 3, "mlp", "--out", parts, "--resume", "--steps", 30, "--batch", 12))
        told = "".join(error for _, error in outputs)
        check(codes[0] == 2 and told.count("headroom:") == 1, f"{way}: {codes} {outputs}")
        codes, outputs = wait(launch(way, 2, "mlp", "--out", parts, "--resume", "--steps", 30))
        check(not any(codes), f"{way}: {codes} {outputs}")
        check("".join(error for _, error in outputs).count("resuming after step 15") == 1, outputs)
        course = [[(step["loss"], step["scale"], step["overflow"]) for step in history(folder)[1]]
                  for folder in (whole, parts)]
        check(course[0] == course[1] and len(course[0]) == 30, f"{way}: {course}")
        check(0 < sum(step[2] for step in course[0]) < 30, f"{way}: {course}")

        # No scale helps: all go over to the other precision, from the same checkpoint.
        folder = f"{temp}/{way}.escape"
        codes, outputs = wait(launch(way, 2, "mlp", "--precision", "fp16", "--steps", 60, "--out", folder,
                                     "--inject", "nan:step=8-40,rank=1", "--escape", "fp32"))
        check(not any(codes), f"{way}: {codes} {outputs}")
        check("switching from fp16 to fp32" in outputs[0][1] and history(folder)[3]["steps"] == 60, outputs)

        # Asked to stop, all stop after the same step, and the history is whole.
        folder = f"{temp}/{way}.stopped"
        processes = launch(way, 2, "mlp", "--steps", 10**7, "--out", folder)
        check(until(lambda folder=folder: grown(folder)), f"{way} has begun")
        for pid in pids(folder, variable):
            os.kill(pid, signal.SIGTERM)  # one of them is enough
        codes, outputs = wait(processes, 60)
        check(all(code == 130 for code in codes), f"{way}: {codes} {outputs}")
        check("stopped by hand" in outputs[0][0], f"{way}: {outputs}")
        check(history(folder)[3] is not None, f"{way}: no end")

        # Bad input is told once.
        codes, outputs = wait(launch(way, 2, "mlp", "--batch", 13))
        told = "".join(error for _, error in outputs)
        check(codes[0] == 2 and told.count("with 2 ranks it must be a multiple of 2") == 1, outputs)
        codes, outputs = wait(launch(way, 2, "mlp", "--timeout", "nan"))
        check(codes[0] == 2, outputs)

    if "gloo" in ways:  # the first rank never comes
        result = subprocess.run([program, "train", "mlp", "--timeout", "1"], text=True, capture_output=True,
                                env={**NO_RANKS, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                     "MASTER_PORT": "9"})
        check(result.returncode == 1, result)
        check("headroom: rank 1: Another rank did not come" in result.stderr, result)

    # An environment that makes no sense.
    for odd, sentence in {"WORLD_SIZE=2": "not all of RANK", "WORLD_SIZE=x": "WORLD_SIZE='x'",
                          "WORLD_SIZE=2 RANK=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1": "rank 2 of 2"}.items():
        result = subprocess.run([program, "train", "mlp", "--steps", "1"], text=True, capture_output=True,
                                env={**NO_RANKS, **dict(pair.split("=") for pair in odd.split())})
        check(result.returncode == 2 and sentence in result.stderr, f"{odd}: {result}")

finish()
