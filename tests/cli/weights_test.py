#!/usr/bin/env python3
"""weights_test.py PROGRAM: `headroom inspect --weights`: verdicts, exit codes, JSON and hostile files.
tests/python/inspect_test.py compares its counts with NumPy's."""
import array
import json
import os
import struct
import subprocess
import sys

from runs import check, run_tests

PROGRAM = sys.argv[1]
EVIL = "\x1b]0;x\x07\u009b\u202e\n"


def run(*arguments):
    return subprocess.run([PROGRAM, "inspect", "--weights", *map(str, arguments)], capture_output=True, text=True)


def write(path, tensors):
    header, data = {}, b""
    for name, (dtype, content, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(content) // size], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    return path


def floats(*values):
    return ("F32", struct.pack(f"<{len(values)}f", *values), 4)


def test_exit_codes_are_0_for_safe_3_for_unsafe_and_2_for_errors(temp):
    safe = write(f"{temp}/safe.safetensors", {"w": floats(1.0, 65504.0)})
    unsafe = write(f"{temp}/unsafe.safetensors", {"w": floats(1.0, 65520.0), "v": floats(1.0)})
    result = run(safe)
    check(result.returncode == 0 and "Safe in FP16: no weight overflows" in result.stdout, result)
    result = run(unsafe)
    check(result.returncode == 3 and "Keep in FP32: w." in result.stdout and result.stderr == "", result)
    check(run(safe, unsafe).returncode == 3, "one of two files")
    check(run(f"{temp}/nothing").returncode == 2, "a missing file")
    for option in (["--scale", "8"], ["--format", "bf16"], ["--html", "x.html"], ["--tensor", "w"], ["--as", "bf16"]):
        check(run(safe, *option).returncode == 2, option)
    check(run(write(f"{temp}/a.safetensors", {"w": floats(1e-9, *[1.0] * 150)})).returncode == 0, "one of 151 becomes zero")
    check(run(f"{temp}/a.safetensors", "--lose", "0.001").returncode == 3, "--lose")


def test_json_has_every_tensor_and_the_verdict(temp):
    bf16 = ("BF16", array.array("H", [0x3F80, 0x4780, 0x3280, 0x3300]).tobytes(), 2)  # 1, 65536, 2^-26, 2^-25
    path = write(f"{temp}/a.safetensors", {"w": bf16, EVIL: floats(2.0), "step": ("I64", bytes(8), 8)})
    result = run(path, "--json")
    found = json.loads(result.stdout)
    check(result.returncode == 3 and not found["safe"] and found["keep_fp32"] == ["w"], found)
    w, evil = found["tensors"]
    check((w["dtype"], w["count"], w["flushed"], w["overflow"], w["subnormal"]) == ("bf16", 4, 2, 1, 0), w)
    check(evil["name"] == EVIL and evil["largest"] == 2.0, evil)
    check(found["left_out"] == [{"file": path, "name": "step", "dtype": "I64", "count": 1}], found["left_out"])
    check(found["complete"], "integers are no weights")
    check(found["verdict"].startswith("Unsafe in FP16: 1 weight overflows") and found["total"]["count"] == 5, found)


def test_a_checkpoint_of_which_weights_were_left_out_is_not_called_safe(temp):
    small = ("F8_E4M3", bytes(1000), 1)
    path = write(f"{temp}/a.safetensors", {"big": small, "norm": floats(1.0, 2.0, 3.0, 4.0)})
    found = json.loads(run(path, "--json").stdout)
    check(run(path).returncode == 3 and not found["safe"] and not found["complete"], found)
    check(found["verdict"] == "Not known to be safe in FP16: only 4 of 1,004 floating-point weights (0.40 %) were judged, "
          "because F8_E4M3 is not read, the type of big. Of these no weight overflows (the largest is 4, FP16 ends at 65504), "
          "and none becomes zero.", found["verdict"])
    path = write(f"{temp}/b.safetensors", {"big": small, "norm": floats(7e4)})
    check("; only 1 of 1,001 floating-point weights" in json.loads(run(path, "--json").stdout)["verdict"], "unsafe as well")


def test_a_file_that_is_given_twice_is_counted_once(temp):
    path = write(f"{temp}/a.safetensors", {"w": floats(1.0, 2.0)})
    os.symlink(path, f"{temp}/link")
    for paths in ((path, path), (path, f"{temp}/../{os.path.basename(temp)}/a.safetensors"), (path, f"{temp}/link"), (temp, path)):
        found = json.loads(run(*paths, "--json").stdout)
        check(found["total"]["count"] == 2 and len(found["tensors"]) == 1, (paths, found))


def test_control_characters_in_names_are_replaced(temp):
    result = run(write(f"{temp}/a.safetensors", {EVIL: floats(7e4)}))
    check(not set(EVIL) - set("]0;x\n") & set(result.stdout) and "?]0;x????" in result.stdout, result.stdout)


def test_the_worst_tensors_come_first_and_all_prints_every_one(temp):
    tensors = {f"model.layers.{i}.mlp.down_proj_with_a_long_name.weight": floats(1.0, 0.5) for i in range(60)}
    tensors["model.layers.7.mlp.down_proj_with_a_long_name.weight"] = floats(1e5, 1.0)
    path = write(f"{temp}/a.safetensors", tensors)
    lines = run(path).stdout.splitlines()
    check("20 tensors that lose most in FP16 (of 60)" in lines[2] and "7" in lines[4] and "1e+05" in lines[4], lines)
    check(all(len(line) <= 80 for line in lines), max(lines, key=len))
    check(len(run(path, "--all").stdout.splitlines()) > 60, "--all")


def test_an_index_stands_for_its_shards(temp):
    write(f"{temp}/a-1.safetensors", {"x": floats(1.0)})
    write(f"{temp}/a-2.safetensors", {"y": floats(7e4)})
    with open(f"{temp}/model.safetensors.index.json", "w") as file:
        json.dump({"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}, file)
    for path in (f"{temp}/model.safetensors.index.json", temp):
        result = run(path)
        check(result.returncode == 3 and "2 files: 2 weights" in result.stdout, result)
    with open(f"{temp}/model.safetensors.index.json", "w") as file:
        json.dump({"weight_map": {"x": "../a-1.safetensors" + EVIL}}, file)
    result = run(temp)
    check(result.returncode == 2 and "which is no file name" in result.stderr and result.stderr.count("\n") == 1
          and "\x1b" not in result.stderr, result)


def test_a_folder_in_which_shards_are_missing_gets_no_verdict(temp):
    first = write(f"{temp}/model-00001-of-00002.safetensors", {"x": floats(1.0)})
    result = run(temp)
    check(result.returncode == 2 and "has 1 of the 2 shards of 'model'" in result.stderr, result)
    check(run(first).returncode == 0, "a file that is named")
    write(f"{temp}/model-00002-of-00002.safetensors", {"y": floats(7e4)})
    check(run(temp).returncode == 3, "both shards")


def test_damaged_files_are_refused(temp):
    path = write(f"{temp}/a.safetensors", {"w": floats(*[1.0] * 100)})
    with open(path, "rb") as file:
        content = file.read()
    for damaged in (b"", content[:5], content[:50], content[:-1], content + b"x", b"\xff" * 8 + content[8:]):
        with open(path, "wb") as file:
            file.write(damaged)
        result = run(path)
        check(result.returncode == 2 and result.stderr.count("\n") == 1, result)
    os.mkfifo(f"{temp}/pipe.safetensors")
    check(run(f"{temp}/pipe.safetensors").returncode == 2, "a pipe")


run_tests(globals())
