#!/usr/bin/env python3
"""Jobs of several processes over MPI or Gloo: all ranks agree, and all of them stop with an error when
one rank is lost or diverges.

    job_test.py mpi|gloo JOB CASE RANKS
"""
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

transport, job, case, ranks = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
LIMIT_MS = 3000  # time limit of the ranks in the cases that lose one


def start(mode, folder, steps, limit):
    arguments = [job, mode, folder, str(steps), str(limit)]
    one_thread = {"OMP_NUM_THREADS": "1"}
    if transport == "mpi":
        # With recovery enabled mpirun does not end the other ranks when one dies.
        command = ["mpirun", "--oversubscribe", "--enable-recovery", "-n", str(ranks), *arguments]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return [subprocess.Popen(command, env={**os.environ, **one_thread, **root}, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [subprocess.Popen(arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env={**os.environ, **one_thread, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
            for rank in range(ranks)]


def wait(processes, seconds):
    """The combined output and the exit codes of all processes; kills those that hang."""
    end = time.time() + seconds
    output = ""
    for process in processes:
        try:
            output += process.communicate(timeout=max(1, end - time.time()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output += process.communicate()[0]
    return output, [process.returncode for process in processes]


def stopped_processes(folder):
    """The process ids of this test's ranks that have stopped themselves."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/stat") as stat:
                if folder.encode() in line.read() and stat.read().rsplit(")", 1)[1].split()[0] == "T":
                    found.append(int(pid))
        except OSError:
            pass
    return found


with tempfile.TemporaryDirectory() as folder:
    if case in ("replicated", "sharded"):
        output, codes = wait(start(case, folder, 1000, 60000), 300)
        assert all(code == 0 for code in codes), (codes, output)
        ends = [open(f"{folder}/{rank}").read().split() for rank in range(ranks)]
        assert all(end == ends[0] for end in ends), ends
        bad = sum(step % 37 == 5 or step % 53 == 7 for step in range(1000))
        assert ends[0][1:3] == [str(bad), "0"], (ends[0], bad)
        print(f"{ranks} ranks, 1000 steps, {bad} skipped, all the same bits: {ends[0][0]}")
    else:
        began = time.time()
        processes = start(case, folder, 100, 60000 if case in ("drift", "scale") else LIMIT_MS)
        if case == "stop":
            while not stopped_processes(folder) and time.time() < began + 60:
                time.sleep(0.1)
            time.sleep(LIMIT_MS / 1000 + 3)
            for pid in stopped_processes(folder):
                os.kill(pid, signal.SIGKILL)
        output, codes = wait(processes, 100)
        took = time.time() - began
        lines = [line for line in output.splitlines() if line.startswith("rank ")]
        print("\n".join(lines), f"\n{took:.1f} s")
        message = "The ranks" if case in ("drift", "scale") else "Another rank"
        # Every remaining rank reports the error: all of them, or all but rank 1.
        remaining = ranks if case in ("drift", "scale") else ranks - 1
        assert sum(message in line for line in lines) == remaining, output
        assert took < 100, took  # generous for a busy machine; no rank may wait forever
        assert not os.listdir(folder), os.listdir(folder)
        assert transport == "mpi" or any(code != 0 for code in codes), codes
