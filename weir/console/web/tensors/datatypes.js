// KServe's datatypes: values to bytes and JSON, and back.

/** What a datatype's values look like in a typed array; BYTES, FP16 and BF16 have none. */
const ARRAYS = {
  BOOL: Uint8Array,
  UINT8: Uint8Array,
  UINT16: Uint16Array,
  UINT32: Uint32Array,
  UINT64: BigUint64Array,
  INT8: Int8Array,
  INT16: Int16Array,
  INT32: Int32Array,
  INT64: BigInt64Array,
  FP32: Float32Array,
  FP64: Float64Array,
};

export const NUMPY = {
  BOOL: "np.bool_",
  UINT8: "np.uint8",
  UINT16: "np.uint16",
  UINT32: "np.uint32",
  UINT64: "np.uint64",
  INT8: "np.int8",
  INT16: "np.int16",
  INT32: "np.int32",
  INT64: "np.int64",
  FP16: "np.float16",
  FP32: "np.float32",
  FP64: "np.float64",
  BYTES: "np.object_",
};

/** Whether JSON can't have this datatype: such tensors are sent as bytes. */
export function needsBytes(datatype) {
  return datatype === "FP16" || datatype === "BF16";
}

/** The raw content of a tensor: little-endian values, or for BYTES each element after its length. */
export function encoded(datatype, values) {
  if (datatype === "BYTES") return encodedBytes(values);
  if (datatype === "FP16" || datatype === "BF16") return new Uint8Array(Uint16Array.from(values, datatype === "FP16" ? halfBits : brainBits).buffer);
  const Kind = ARRAYS[datatype];
  if (!Kind) throw new Error(`unknown datatype ${datatype}`);
  if (values instanceof Kind) return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  const isBig = Kind === BigInt64Array || Kind === BigUint64Array;
  return new Uint8Array(Kind.from(values, isBig ? (value) => BigInt(value) : Number).buffer);
}

function encodedBytes(values) {
  const elements = Array.from(values, (value) => (value instanceof Uint8Array ? value : new TextEncoder().encode(String(value))));
  const content = new Uint8Array(elements.reduce((total, element) => total + 4 + element.length, 0));
  const view = new DataView(content.buffer);
  let at = 0;
  for (const element of elements) {
    view.setUint32(at, element.length, true);
    content.set(element, at + 4);
    at += 4 + element.length;
  }
  return content;
}

function brainBits(value) {
  const bits = new Uint32Array(Float32Array.of(value).buffer)[0];
  return Number.isNaN(value) ? 0x7fc0 : ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

function halfBits(value) {
  const bits = new Uint32Array(Float32Array.of(value).buffer)[0];
  const sign = (bits >>> 16) & 0x8000;
  const exponent = ((bits >>> 23) & 0xff) - 127;
  const fraction = bits & 0x7fffff;
  if (exponent === 128) return sign | 0x7c00 | (fraction ? 0x200 : 0);
  if (exponent > 15) return sign | 0x7c00;
  if (exponent >= -14) return rounded(sign | ((exponent + 15) << 10) | (fraction >>> 13), fraction & 0x1fff, 0x1000);
  if (exponent < -25) return sign;
  const whole = fraction | 0x800000;
  const shift = -exponent - 1;
  return rounded(sign | (whole >>> shift), whole & ((1 << shift) - 1), 1 << (shift - 1));
}

function rounded(bits, rest, half) {
  return rest > half || (rest === half && bits & 1) ? bits + 1 : bits;
}

/** The number of elements of a shape. */
export function elements(shape) {
  return shape.reduce((total, dim) => total * dim, 1);
}

/** Nested lists as one flat list. */
export function flat(data) {
  return Array.isArray(data) ? data.flat(Infinity) : [data];
}
