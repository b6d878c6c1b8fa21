"""Writes the binary files of the fuzzing corpus: small .npy, .npz and safetensors files. Needs NumPy.

The texts in scaler/, state_dict/, history/, trace/ and arguments/ come from small runs or were written by hand."""
import io
import json
import os
import struct
import zipfile

import numpy as np

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")
F32 = np.array([[0, 1, -2], [1e-8, 60000, 3]], np.float32)


def write(kind, name, content):
    os.makedirs(os.path.join(HERE, kind), exist_ok=True)
    with open(os.path.join(HERE, kind, name), "wb") as file:
        file.write(content)


def npy(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def safetensors(tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


for name, array in {
        "f2": F32.astype("<f2"), "f4": F32, "f8": F32.astype("<f8"), "big": F32.astype(">f4"),
        "fortran": np.asfortranarray(F32), "scalar": np.float32(3), "empty": F32[:0],
        "void": F32.view("V2"), "int": F32.astype("i4").astype("i2"), "bool": F32 > 0, "text": np.array(["a"]),
        "structured": np.zeros(2, [("a", "f4")])}.items():
    write("npy", name, npy(np.asarray(array)))
write("npy", "version2", npy(F32, (2, 0)))
write("npy", "version3", npy(F32, (3, 0)))

bits = (F32.view(np.uint32) >> 16).astype(np.uint16)
write("safetensors", "one", safetensors({"w": ("F32", F32)}))
write("safetensors", "types", safetensors(
    {"a": ("F16", F32.astype("<f2")), "b": ("BF16", bits), "c": ("F64", F32.astype("<f8")),
     "d": ("I64", F32.astype("<i8")), "e": ("F32", F32[:0]),
     "f": ("F32", np.float32(1).reshape(()))}, {"format": "pt"}))
write("safetensors", "none", safetensors({}))
write("safetensors", "bits", safetensors({"w": ("U16", bits)}))
write("safetensors", "overlap", struct.pack("<Q", 128) + json.dumps(
    {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
     "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(128) + bytes(4))

# The fuzzer corrects the checksums.
CHECKPOINT = {"checksum": "0" * 32, "format": "headroom-checkpoint", "version": "1", "step": "1", "state": "{}"}
write("checkpoint", "one", safetensors({"w": ("F32", F32), "w/half": ("F16", F32.astype("<f2"))}, CHECKPOINT))
write("checkpoint", "none", safetensors({}, CHECKPOINT))
write("checkpoint", "unread", safetensors({"w": ("I64", F32.astype("<i8"))}, CHECKPOINT))
write("checkpoint", "no_step", safetensors({"w": ("F32", F32)}, {**CHECKPOINT, "step": "x"}))

for name, save in (("stored", np.savez), ("deflated", np.savez_compressed)):
    file = io.BytesIO()
    save(file, w=F32, mask=F32 > 0, h=F32.astype("<f2"))
    write("npz", name, file.getvalue())
file = io.BytesIO()
with zipfile.ZipFile(file, "w") as archive:
    archive.writestr("w.npy", npy(F32))
    archive.writestr("notes.txt", "text")
    archive.comment = b"comment"
write("npz", "comment", file.getvalue())
file = io.BytesIO()
with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("bomb.npy", npy(np.zeros(1 << 16, np.float32)))
write("npz", "bomb", file.getvalue())
file = io.BytesIO()
with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
    archive.writestr("w.npy", npy(F32))
write("npz", "lzma", file.getvalue())
