#!/usr/bin/env python3
"""`headroom inspect` as a user runs it, on files whose true shares are known."""
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


# The formats, by hand.

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


# What each of these values becomes in FP16, by Python's own conversion.

def fate(value):
    try:
        bits = struct.unpack("<H", struct.pack("<e", abs(value)))[0]
    except OverflowError:
        return "overflow"
    return "flushed" if bits == 0 else "subnormal" if bits < 0x400 else "kept"


def true_shares(values, scale):
    counts = {"flushed": 0, "subnormal": 0, "overflow": 0, "kept": 0}
    for value in values:
        if value != 0.0:
            counts[fate(value * scale)] += 1
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

# Several files are one table; patterns choose among the tensors; integers are left out and told.
mixed = write("mixed.safetensors", safetensors({
    "layers.0.weight": ("F32", [2], struct.pack("<2f", 1e-9, 1.0)),
    "layers.0.bias": ("F16", [1], struct.pack("<e", 0.5)),
    "step": ("I64", [1], bytes(8)), "none": ("F32", [0, 3], b"")}))
found = inspect(mixed, os.path.join(FOLDER.name, "f32.npy"))
assert [tensor["name"] for tensor in found["tensors"]] == [
    "layers.0.weight", "layers.0.bias", "none", "f32"], found["tensors"]
assert found["total"]["count"] == N + 3
assert found["left_out"] == [{"file": mixed, "name": "step", "dtype": "I64"}]
assert [t["name"] for t in inspect(mixed, "--tensor", "*.weight", "--tensor", "n*")["tensors"]] == [
    "layers.0.weight", "none"]
assert "step was left out (I64)" in run(mixed).stdout

# The recommendation: 1.0 may grow to 2^12, eight times below overflow.
advice = inspect(mixed)["recommendation"]
assert advice["verdict"] == "scale" and advice["scale"] == 4096, advice
assert advice["range"] == [32, 32768], advice
assert "<- recommended" in run(mixed).stdout
assert inspect(mixed, "--format", "bf16")["recommendation"]["verdict"] == "unneeded"
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

assert "0 % of the nonzero" in run(mixed, "--lose=-0").stdout and "-0 %" not in run(mixed, "--lose=-0").stdout

# A share that is just reached is no reason to refuse or to warn.
just = write("just.npy", npy("<f4", 100, struct.pack("<100f", *[1e-12] * 29, *[1.0] * 71)))
page = os.path.join(FOLDER.name, "just.html")
assert inspect(just, "--lose", "0.29", "--html", page)["recommendation"]["verdict"] == "unneeded"
assert 'class="n bad"' not in open(page, encoding="utf-8").read()

# Types that are not read are left out and named, structured ones too; what may be bf16 is told.
fields = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
fields += b"{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n" + bytes(4)
odd = {"a": npy("<f4", 1, struct.pack("<f", 1.0)), "b": fields, "c": npy("<u2", 1, bytes(2))}
for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
    path = write("odd.npz", npz(odd, method))
    assert [(item["name"], item["dtype"]) for item in inspect(path)["left_out"]] == [("b", "structured"), ("c", "<u2")]
    assert "add --as bf16" in run(path).stdout
    assert len(inspect(path, "--as", "bf16")["tensors"]) == 2 and "--as bf16" not in run(path, "--as", "bf16").stdout
for name, content in (("fields.npy", fields), ("fields.npz", npz({"b": fields}, zipfile.ZIP_STORED))):
    result = run(write(name, content))
    assert result.returncode == 2 and "holds a structured array; save its fields one by one" in result.stderr, result

# 300 tensors with long names stay readable: 20 lines of at most 80 columns, or all of them.
long = write("long.safetensors", safetensors({
    f"model.decoder.block_with_a_long_name.{i}.self_attention.query_projection.weight":
    ("F32", [4], struct.pack("<4f", *(10.0 ** -(i % 12) for _ in range(4)))) for i in range(300)}))
table = run(long).stdout.splitlines()
assert max(map(len, table)) <= 80, max(table, key=len)
assert sum("weight" in line for line in table) == 20, table
assert sum("weight" in line for line in run(long, "--all").stdout.splitlines()) == 300

# Names are shown, never obeyed.
name = "\x1b[2J<script>\u009b\u202e\u2066\n"
evil = write("evil.safetensors", safetensors({name: ("F32", [1], bytes(4))}))
assert not set("\x1b\u009b\u202e\u2066") & set(run(evil).stdout) and "?[2J<script>????" in run(evil).stdout
assert inspect(evil)["tensors"][0]["name"] == name
hidden = "\x7f\u009b2J\u202e\u2066\u061c\u20ac"
path = write("hidden.safetensors", safetensors({hidden: ("F32", [1], bytes(4))}))
assert inspect(path)["tensors"][0]["name"] == hidden  # escaped, so nothing is lost
assert not set(hidden[:-1]) & set(run(path, "--json").stdout) - set("2J") and "\u20ac" in run(path, "--json").stdout
before = open(mixed, "rb").read()
result = run(evil, mixed, "--html", mixed)
assert result.returncode == 2 and "is an input" in result.stderr, result
assert open(mixed, "rb").read() == before
page = os.path.join(FOLDER.name, "page.html")
assert run(evil, mixed, "--html", page).returncode == 0
html = open(page, encoding="utf-8").read()
assert "&lt;script&gt;" in html and "[2J<script>" not in html and "layers.0.weight" in html
assert not set("\x1b\u009b\u202e\u2066") & set(html)
assert "http://" not in html and "https://" not in html  # it needs no network

# A page that cannot be written says why, and leaves the one before as it was.
result = run(mixed, "--html", "/no/such/folder/page")
assert "'/no/such/folder/page' could not be written: No such file or directory." in result.stderr, result
limit = "import resource, os, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, -1)); os.execv(sys.argv[1], sys.argv[1:])"
result = subprocess.run([sys.executable, "-c", limit, PROGRAM, "inspect", mixed, "--html", page], capture_output=True,
                        text=True)
assert result.returncode == 2 and "could not be written: File too large" in result.stderr, result
assert open(page, encoding="utf-8").read() == html and not [x for x in os.listdir(FOLDER.name) if x.endswith("tmp")]

with open(os.path.join(FOLDER.name, "out"), "w") as out:
    result = subprocess.run([sys.executable, "-c", limit, PROGRAM, "inspect", "--json", mixed], stdout=out,
                            stderr=subprocess.PIPE, text=True)
assert result.returncode == 2 and result.stderr == "headroom: Standard output could not be written completely.\n", result

# A page may go where the user says, be it a device, a pipe or a link.
assert run(mixed, "--html", "/dev/null").returncode == 0
assert run(mixed, "--html", "/dev/stdout").stdout.startswith("<!doctype html>")
link = os.path.join(FOLDER.name, "link.html")
os.symlink(page, link)
os.remove(page)
for _ in range(2):  # made, then replaced
    assert run(mixed, "--html", link).returncode == 0
    assert open(link, encoding="utf-8").read().startswith("<!doctype html>")

# A reader that has seen enough ends it, quietly.
process = subprocess.Popen([PROGRAM, "inspect", "--json", long], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
process.stdout.read(1)
process.stdout.close()
assert process.wait() == 141 and not process.stderr.read(), process.returncode

# What cannot be used: one sentence that names the file, exit 2, nothing on standard output.
whole = open(mixed, "rb").read()
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
for arguments in ((), ("/no/such/file",), (FOLDER.name,), ("/dev/null",), (mixed, "--scale", "0"),
                  (mixed, "--scale", "nan"), (mixed, "--scale", "-8"), (mixed, "--scale", "1e40"),
                  (mixed, "--format", "fp8"), (mixed, "--lose", "2"), (mixed, "--lose", "nan"),
                  (mixed, "--as", "f16"),
                  (mixed, "--tensor", "nothing*"), (mixed, "--html", "/no/such/folder/page")):
    result = run(*arguments)
    assert result.returncode == 2 and result.stderr and not result.stdout, (arguments, result)

# A full disk is told.
result = subprocess.run(f"{PROGRAM} inspect {mixed} --json >/dev/full", shell=True,
                        capture_output=True, text=True)
assert result.returncode == 2 and "headroom: " in result.stderr, result

# On a terminal there is a progress bar, which is gone in the end; elsewhere there is none.
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
print("1 passed, 0 failed")
