#!/usr/bin/env python3
"""`headroom inspect` on files whose true shares are known, and its output, pages and errors."""
import array
import io
import json
import math
import os
import pty
import random
import struct
import subprocess
import sys
import tempfile
import zipfile

from runs import run_tests

PROGRAM = sys.argv[1]
FOLDER = tempfile.TemporaryDirectory()


def run(*arguments):
    return subprocess.run([PROGRAM, "inspect", *map(str, arguments)], capture_output=True, text=True)


def inspect(*arguments):
    result = run("--json", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def write(name, content):
    path = os.path.join(FOLDER.name, name)
    with open(path, "wb") as file:
        file.write(content)
    return path


# Writers of the file formats, independent of the library.


def safetensors(tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def npy(descr, count, content):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({count},), }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + content


def npz(members, method):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            with archive.open(name + ".npy", "w", force_zip64=True) as member:
                member.write(content)
    return file.getvalue()


def bf16_bits(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


# What values become in FP16, by Python's own conversion.


def classify(value):
    try:
        bits = struct.unpack("<H", struct.pack("<e", abs(value)))[0]
    except OverflowError:
        return "overflow"
    return "flushed" if bits == 0 else "subnormal" if bits < 0x400 else "kept"


def true_shares(values, scale):
    counts = {"flushed": 0, "subnormal": 0, "overflow": 0, "kept": 0}
    for value in values:
        if value != 0.0:
            counts[classify(value * scale)] += 1
    return {name: count / len(values) for name, count in counts.items()}


random.seed(5)
N = 60000
VALUES = [0.0 if random.random() < 0.25 else
          random.gauss(0, 1) * 2.0 ** random.gauss(-12, 7) for _ in range(N)]
F32 = array.array("f", VALUES)
F16 = [max(-65504.0, min(65504.0, value)) for value in VALUES]
BF16 = array.array("H", [bf16_bits(value) for value in VALUES])
DUMPS = {
    "f64": ("F64", "<f8", array.array("d", VALUES).tobytes(), VALUES),
    "f32": ("F32", "<f4", F32.tobytes(), list(F32)),
    "f16": ("F16", "<f2", struct.pack(f"<{N}e", *F16),
            list(struct.unpack(f"<{N}e", struct.pack(f"<{N}e", *F16)))),
    "bf16": ("BF16", "<V2", BF16.tobytes(),
             [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in BF16]),
}

MIXED = write("mixed.safetensors", safetensors({
    "layers.0.weight": ("F32", [2], struct.pack("<2f", 1e-9, 1.0)),
    "layers.0.bias": ("F16", [1], struct.pack("<e", 0.5)),
    "step": ("I64", [1], bytes(8)), "none": ("F32", [0, 3], b"")}))
LONG_NAMES = write("long.safetensors", safetensors({
    f"model.decoder.block_with_a_long_name.{i}.self_attention.query_projection.weight":
    ("F32", [4], struct.pack("<4f", *(10.0 ** -(i % 12) for _ in range(4)))) for i in range(300)}))
EVIL_NAME = "\x1b[2J<script>\u009b\u202e\u2066\n"
EVIL = write("evil.safetensors", safetensors({EVIL_NAME: ("F32", [1], bytes(4))}))
# Runs a command with a limit on the file size, which simulates a full disk.
LIMITED = [sys.executable, "-c", "import resource, os, sys; "
           "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, -1)); os.execv(sys.argv[1], sys.argv[1:])"]


def test_shares_are_exact_for_every_type_and_file_format():
    for dtype, (code, descr, content, values) in DUMPS.items():
        files = [write(f"{dtype}.safetensors", safetensors({"w": (code, [N], content)})),
                 write(f"{dtype}.npy", npy(descr, N, content)),
                 write(f"{dtype}-stored.npz", npz({"w": npy(descr, N, content)}, zipfile.ZIP_STORED)),
                 write(f"{dtype}-packed.npz", npz({"w": npy(descr, N, content)}, zipfile.ZIP_DEFLATED))]
        powers = [0, -7, 3, 11, 20]
        truth = {power: true_shares(values, 2.0 ** power) for power in powers}
        odd = true_shares(values, 1000.0)
        for path in files:
            found = inspect(path, "--as", "bf16")
            [tensor] = found["tensors"]
            assert tensor["dtype"] == dtype and tensor["shape"] == [N], tensor
            assert abs(tensor["zeros_share"] - values.count(0.0) / N) < 1e-6
            assert tensor["largest"] == max(map(abs, values)), tensor
            assert tensor["smallest"] == min(abs(value) for value in values if value != 0.0), tensor
            by_scale = {at["scale"]: at for at in tensor["scales"]}
            for power in powers:
                for name in ("flushed", "subnormal", "overflow"):
                    share = by_scale[2.0 ** power][name + "_share"]
                    assert abs(share - truth[power][name]) < 1e-6, (path, power, name)
            at = inspect(path, "--as", "bf16", "--scale", "1000")["total"]["at_scale"]
            for name in ("flushed", "subnormal", "overflow"):
                assert abs(at[name + "_share"] - odd[name]) < 1e-6, (path, name, at, odd)


def test_several_files_share_one_table():
    # Patterns select tensors; integer tensors are omitted and listed.
    found = inspect(MIXED, write("f32.npy", npy("<f4", N, F32.tobytes())))
    assert [tensor["name"] for tensor in found["tensors"]] == [
        "layers.0.weight", "layers.0.bias", "none", "f32"], found["tensors"]
    assert found["total"]["count"] == N + 3
    assert found["left_out"] == [{"file": MIXED, "name": "step", "dtype": "I64"}]
    assert [t["name"] for t in inspect(MIXED, "--tensor", "*.weight", "--tensor", "n*")["tensors"]] == [
        "layers.0.weight", "none"]
    assert "step was left out (I64)" in run(MIXED).stdout


def test_recommended_scale_keeps_a_distance_of_eight_from_overflow():
    # The largest gradient is 1.0, so the scale is 2^12.
    advice = inspect(MIXED)["recommendation"]
    assert advice["verdict"] == "scale" and advice["scale"] == 4096, advice
    assert advice["range"] == [32, 32768], advice
    assert "<- recommended" in run(MIXED).stdout
    assert inspect(MIXED, "--format", "bf16")["recommendation"]["verdict"] == "unneeded"
    wide = write("wide.npy", npy("<f4", 3, struct.pack("<3f", 1e-30, 1.0, 1e4)))
    assert inspect(wide)["recommendation"]["verdict"] == "none fits"
    page = os.path.join(FOLDER.name, "none.html")
    shown = run(wide, "--html", page).stdout + open(page, encoding="utf-8").read()
    assert "<- largest safe\n" in shown and "largest safe scale" in shown and "recommended" not in shown, shown
    vast = write("vast.npy", npy("<f8", 1, struct.pack("<d", 1e300)))
    assert "<- smallest\n" in run(vast).stdout, run(vast).stdout
    assert inspect(wide, "--lose", "0.5")["recommendation"]["verdict"] == "scale"
    zeros = write("zeros.npy", npy("<f4", 2, bytes(8)))
    assert inspect(zeros, "--html", page)["recommendation"]["verdict"] == "nothing" and run(zeros).returncode == 0
    assert "recommended" not in open(page, encoding="utf-8").read()
    broken = write("inf.npy", npy("<f4", 3, struct.pack("<3f", math.inf, math.nan, 1.0)))
    assert "1 inf and 1 nan, first in inf" in run(broken).stdout

    assert "0 % of the nonzero" in run(MIXED, "--lose=-0").stdout and "-0 %" not in run(MIXED, "--lose=-0").stdout


def test_share_equal_to_lose_is_accepted_without_a_warning():
    just = write("just.npy", npy("<f4", 100, struct.pack("<100f", *[1e-12] * 29, *[1.0] * 71)))
    page = os.path.join(FOLDER.name, "just.html")
    assert inspect(just, "--lose", "0.29", "--html", page)["recommendation"]["verdict"] == "unneeded"
    assert 'class="n bad"' not in open(page, encoding="utf-8").read()


def test_unsupported_arrays_are_omitted_and_listed():
    # --as bf16 is suggested where it applies.
    fields = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
    fields += b"{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n" + bytes(4)
    odd = {"a": npy("<f4", 1, struct.pack("<f", 1.0)), "b": fields, "c": npy("<u2", 1, bytes(2))}
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = write("odd.npz", npz(odd, method))
        omitted = [(item["name"], item["dtype"]) for item in inspect(path)["left_out"]]
        assert omitted == [("b", "structured"), ("c", "<u2")], omitted
        assert "add --as bf16" in run(path).stdout
        assert len(inspect(path, "--as", "bf16")["tensors"]) == 2
        assert "--as bf16" not in run(path, "--as", "bf16").stdout
    for name, content in (("fields.npy", fields), ("fields.npz", npz({"b": fields}, zipfile.ZIP_STORED))):
        result = run(write(name, content))
        assert result.returncode == 2, result
        assert "holds a structured array; save its fields one by one" in result.stderr, result


def test_table_has_20_lines_of_80_columns_unless_all_are_requested():
    table = run(LONG_NAMES).stdout.splitlines()
    assert max(map(len, table)) <= 80, max(table, key=len)
    assert sum("weight" in line for line in table) == 20, table
    assert sum("weight" in line for line in run(LONG_NAMES, "--all").stdout.splitlines()) == 300


def test_control_characters_and_markup_in_names_are_shown_as_text():
    assert not set("\x1b\u009b\u202e\u2066") & set(run(EVIL).stdout) and "?[2J<script>????" in run(EVIL).stdout
    assert inspect(EVIL)["tensors"][0]["name"] == EVIL_NAME
    hidden = "\x7f\u009b2J\u202e\u2066\u061c\u20ac"
    path = write("hidden.safetensors", safetensors({hidden: ("F32", [1], bytes(4))}))
    assert inspect(path)["tensors"][0]["name"] == hidden  # JSON escapes keep the whole name
    assert not set(hidden[:-1]) & set(run(path, "--json").stdout) - set("2J") and "\u20ac" in run(path, "--json").stdout
    before = open(MIXED, "rb").read()
    result = run(EVIL, MIXED, "--html", MIXED)
    assert result.returncode == 2 and "is an input" in result.stderr, result
    assert open(MIXED, "rb").read() == before
    page = os.path.join(FOLDER.name, "page.html")
    assert run(EVIL, MIXED, "--html", page).returncode == 0
    html = open(page, encoding="utf-8").read()
    assert "&lt;script&gt;" in html and "[2J<script>" not in html and "layers.0.weight" in html
    assert not set("\x1b\u009b\u202e\u2066") & set(html)
    assert "http://" not in html and "https://" not in html  # the page loads nothing


def test_unwritable_output_is_reported_and_leaves_the_old_page():
    result = run(MIXED, "--html", "/no/such/folder/page")
    assert "'/no/such/folder/page' could not be written: No such file or directory." in result.stderr, result
    page = os.path.join(FOLDER.name, "page.html")
    assert run(MIXED, "--html", page).returncode == 0
    html = open(page, encoding="utf-8").read()
    result = subprocess.run([*LIMITED, PROGRAM, "inspect", MIXED, "--html", page], capture_output=True,
                            text=True)
    assert result.returncode == 2 and "could not be written: File too large" in result.stderr, result
    assert open(page, encoding="utf-8").read() == html and not [x for x in os.listdir(FOLDER.name) if x.endswith("tmp")]

    with open(os.path.join(FOLDER.name, "out"), "w") as out:
        result = subprocess.run([*LIMITED, PROGRAM, "inspect", "--json", MIXED], stdout=out,
                                stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2, result
    assert result.stderr == "headroom: Standard output could not be written completely.\n", result


def test_page_may_be_written_to_a_device_pipe_or_link():
    assert run(MIXED, "--html", "/dev/null").returncode == 0
    assert run(MIXED, "--html", "/dev/stdout").stdout.startswith("<!doctype html>")
    link = os.path.join(FOLDER.name, "link.html")
    os.symlink(os.path.join(FOLDER.name, "target.html"), link)
    for _ in range(2):  # created, then replaced
        assert run(MIXED, "--html", link).returncode == 0
        assert open(link, encoding="utf-8").read().startswith("<!doctype html>")


def test_closed_pipe_ends_the_program_without_a_message():
    process = subprocess.Popen([PROGRAM, "inspect", "--json", LONG_NAMES], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait() == 141 and not process.stderr.read(), process.returncode


def test_invalid_files_are_refused_with_their_name():
    whole = open(MIXED, "rb").read()
    for content, part in ((whole[:-1], "truncated"), (whole + b"x", "after its last tensor"),
                          (b"", "too short"), (b"\xff" * 64, "more than the file has"),
                          (npy("<f4", 1 << 60, bytes(8)), "larger than any file"),
                          (npy("<V2", 2, bytes(4)), "--as bf16"),
                          (npz({"w": npy("<f4", 2, bytes(8))}, zipfile.ZIP_BZIP2), "method 12")):
        path = write("bad", content)
        result = run(path)
        assert result.returncode == 2 and result.stdout == "", result
        assert part in result.stderr and path in result.stderr, (part, result.stderr)
        assert result.stderr.count("\n") == 1, result.stderr


def test_invalid_arguments_are_refused():
    for arguments in ((), ("/no/such/file",), (FOLDER.name,), ("/dev/null",), (MIXED, "--scale", "0"),
                      (MIXED, "--scale", "nan"), (MIXED, "--scale", "-8"), (MIXED, "--scale", "1e40"),
                      (MIXED, "--format", "fp8"), (MIXED, "--lose", "2"), (MIXED, "--lose", "nan"),
                      (MIXED, "--as", "f16"),
                      (MIXED, "--tensor", "nothing*"), (MIXED, "--html", "/no/such/folder/page")):
        result = run(*arguments)
        assert result.returncode == 2 and result.stderr and not result.stdout, (arguments, result)


def test_full_disk_is_reported():
    result = subprocess.run(f"{PROGRAM} inspect {MIXED} --json >/dev/full", shell=True,
                            capture_output=True, text=True)
    assert result.returncode == 2 and "headroom: " in result.stderr, result


def test_terminal_shows_a_progress_bar_and_erases_it():
    big = write("big.npz", npz({"w": npy("<f4", 1 << 23, bytes(1 << 25))}, zipfile.ZIP_DEFLATED))
    parent, child = pty.openpty()
    process = subprocess.Popen([PROGRAM, "inspect"] + [big] * 8, stdout=subprocess.DEVNULL,
                               stderr=child)
    os.close(child)
    drawn = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:
            break
        if not piece:
            break
        drawn += piece
    assert process.wait() == 0
    assert b"reading [" in drawn and drawn.endswith(b"\r\x1b[K"), drawn[-200:]
    assert run(big).stderr == ""


run_tests(globals())
