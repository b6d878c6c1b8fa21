"""Makes and reads images for the tests of the program."""
import struct
import zlib


def png(width, height):
    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
    rows = b"".join(b"\0" + bytes((x * 255 // width, y * 255 // height, 128)[c]
                                  for x in range(width) for c in range(3)) for y in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def unfilter(kind, line, above):
    """Undoes the filter of a row of RGB pixels; 1: left, 2: above, 3: their mean, 4: Paeth's choice."""
    for i in range(len(line)):
        left, corner = (line[i - 3], above[i - 3]) if i >= 3 else (0, 0)
        up = above[i]
        guess = left + up - corner
        paeth = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
        line[i] = (line[i] + (0, left, up, (left + up) // 2, paeth)[kind]) & 255
    return line


def read_png(path):
    """The rows of an RGB image, each a list of (red, green, blue)."""
    with open(path, "rb") as file:
        data = file.read()
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    assert (depth, colour) == (8, 2), (depth, colour)
    at, packed = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        packed += data[at + 8:at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    raw, stride = zlib.decompress(packed), 3 * width + 1
    rows, above = [], bytearray(3 * width)
    for y in range(height):
        above = unfilter(raw[y * stride], bytearray(raw[y * stride + 1:(y + 1) * stride]), above)
        rows.append([tuple(above[i:i + 3]) for i in range(0, 3 * width, 3)])
    return rows
