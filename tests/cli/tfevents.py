"""A reader of TensorBoard event files that is independent of the writer."""
import struct


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked_crc(data):
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    """The records of a TFRecord file, every checksum checked."""
    at = 0
    while at < len(data):
        head = data[at:at + 8]
        (length,) = struct.unpack("<Q", head)
        assert struct.unpack("<I", data[at + 8:at + 12])[0] == masked_crc(head), f"length at {at}"
        body = data[at + 12:at + 12 + length]
        assert len(body) == length, f"record at {at} is cut"
        (crc,) = struct.unpack("<I", data[at + 12 + length:at + 16 + length])
        assert crc == masked_crc(body), f"record at {at}"
        yield body
        at += 16 + length


def fields(message):
    """The (number, value) of each field of a protocol buffer; bytes for values of other types than varint."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
            continue
        length = {1: 8, 5: 4}.get(wire)
        if length is None:
            assert wire == 2, wire
            length = varint()
        value = message[at:at + length]
        assert len(value) == length
        at += length
        yield number, value


def double(value):
    return struct.unpack("<d", value)[0]


def doubles(value):
    return list(struct.unpack(f"<{len(value) // 8}d", value))


def hparams(metadata):
    """The message of the HParams plugin: its settings, or its status as a number."""
    plugin = dict(fields(dict(fields(metadata))[1]))
    assert plugin[1] == b"hparams", plugin
    (number, message), = fields(plugin[2])
    if number == 4:
        return dict(fields(message))[1]
    assert number == 3, number
    settings = {}
    for key, entry in fields(message):
        if key == 1:
            pair = dict(fields(entry))
            (kind, value), = fields(pair[2])
            settings[pair[1].decode("utf-8")] = double(value) if kind == 2 else value.decode("utf-8")
    return settings


def read(path):
    """(step, tag, value) of every summary: a float, a histogram as a dictionary, or a message of the HParams plugin."""
    with open(path, "rb") as file:
        events = list(records(file.read()))
    first = dict(fields(events[0]))
    assert first[3] == b"brain.Event:2" and double(first[1]) > 1.6e9, first
    found = []
    for event in events[1:]:
        parts = dict(fields(event))
        assert double(parts[1]) >= double(first[1])
        for number, value in fields(parts[5]):
            assert number == 1
            entry = dict(fields(value))
            tag = entry[1].decode("utf-8")
            if 9 in entry:
                found.append((parts.get(2), tag, hparams(entry[9])))
                continue
            if 2 in entry:
                found.append((parts.get(2, 0), tag, struct.unpack("<f", entry[2])[0]))
                continue
            histogram = dict(fields(entry[5]))
            names = {1: "min", 2: "max", 3: "num", 4: "sum", 5: "squares"}
            made = {name: double(histogram[key]) for key, name in names.items()}
            made["limits"], made["counts"] = doubles(histogram[6]), doubles(histogram[7])
            found.append((parts.get(2, 0), tag, made))
    return found
