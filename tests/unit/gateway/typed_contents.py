"""Elements of every datatype that typed contents can carry, and the field that carries them."""

TYPED = {
    "BOOL": ("bool_contents", [True, False, True]),
    "INT8": ("int_contents", [-128, 127, 0]),
    "INT16": ("int_contents", [-32768, 32767, 0]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1, 0]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1, 0]),
    "UINT8": ("uint_contents", [0, 255, 7]),
    "UINT16": ("uint_contents", [0, 65535, 7]),
    "UINT32": ("uint_contents", [0, 2**32 - 1, 7]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1, 7]),
    "FP32": ("fp32_contents", [0.5, -2.0, float("inf")]),
    "FP64": ("fp64_contents", [0.1, -2.0, float("-inf")]),
    "BYTES": ("bytes_contents", [b"", b"\x00\xff", "ä".encode()]),
}
