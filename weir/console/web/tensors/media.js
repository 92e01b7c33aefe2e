// Files as tensors: pictures with a canvas, sounds with WebAudio, anything as BYTES.

import { elements } from "./datatypes.js";

export const SCALES = {
  "0–255": (value) => value,
  "0–1": (value) => value / 255,
  "−1–1": (value) => value / 127.5 - 1,
  ImageNet: (value, channel) => (value / 255 - [0.485, 0.456, 0.406][channel % 3]) / [0.229, 0.224, 0.225][channel % 3],
};

const MAX_SIDE = 1024;
const LEAST_SIDE = 8;

/**
 * How a picture fits a tensor of these dims (without the batch dimension): `{layout, channels, height, width}`, where a
 * variable side is -1; null if it does not.
 */
export function pictureLayout(dims) {
  const inner = dims.length === 4 && (dims[0] === -1 || dims[0] === 1) ? dims.slice(1) : dims;
  if (inner.length !== 3) return null;
  const isChannels = (dim) => dim === 1 || dim === 3 || dim === 4;
  const [first, second, third] = inner;
  const isSide = (dim) => dim === -1 || dim >= LEAST_SIDE;
  if (isChannels(first) && isSide(second) && isSide(third)) return { layout: "NCHW", channels: first, height: second, width: third };
  if (isChannels(third) && isSide(first) && isSide(second)) return { layout: "NHWC", channels: third, height: first, width: second };
  return null;
}

const LEAST_SAMPLES = 256;

/**
 * The number of samples of a sound that fits, -1 for any; null if none fits. `kind` is what the server takes the input for: a
 * variable dimension of any model could be one of samples.
 */
export function soundLength(dims, kind) {
  const long = dims.filter((dim) => dim === -1 || dim > 1);
  return long.length === 1 && (kind === "audio" || long[0] >= LEAST_SAMPLES) ? long[0] : null;
}

/** The picture in a file, drawn into a canvas of this size (null: its own, at most 1024 pixels a side). */
export async function drawnPicture(file, height, width) {
  const picture = await createImageBitmap(file);
  const shrink = Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = width > 0 ? width : Math.max(1, Math.round(picture.width * shrink));
  canvas.height = height > 0 ? height : Math.max(1, Math.round(picture.height * shrink));
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvas;
}

/** The pixels of a canvas as a tensor's values: `{shape, data}`, `shape` without the batch dimension. */
export function pixels(canvas, { layout, channels }, datatype, scale) {
  const { width, height } = canvas;
  const source = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const shape = layout === "NCHW" ? [channels, height, width] : [height, width, channels];
  const Kind = datatype === "UINT8" ? Uint8Array : Float32Array;
  const data = new Kind(elements(shape));
  const convert = datatype === "UINT8" ? SCALES["0–255"] : SCALES[scale];
  const area = width * height;
  for (let place = 0; place < area; place += 1) {
    const [red, green, blue, alpha] = [source[place * 4], source[place * 4 + 1], source[place * 4 + 2], source[place * 4 + 3]];
    const values = channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue, alpha];
    for (let channel = 0; channel < channels; channel += 1) {
      data[layout === "NCHW" ? channel * area + place : place * channels + channel] = convert(values[channel], channel);
    }
  }
  return { shape, data };
}

/** The samples of a sound file as mono floats at this rate. */
export async function monoSamples(file, rate) {
  const decoder = new OfflineAudioContext(1, 1, rate);
  const sound = await decoder.decodeAudioData(await file.arrayBuffer());
  const mono = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) {
    const samples = sound.getChannelData(channel);
    for (let place = 0; place < mono.length; place += 1) mono[place] += samples[place] / sound.numberOfChannels;
  }
  return mono;
}

/** A picture with lines of text, as a PNG file: to try a model without a picture at hand. */
export async function examplePicture() {
  const canvas = document.createElement("canvas");
  canvas.width = 560;
  canvas.height = 220;
  const context = canvas.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = "#191970";
  context.font = "36px sans-serif";
  ["A weir is a low dam", "that turns uneven flow", "into a steady one."].forEach((line, place) => context.fillText(line, 36, 56 + place * 62));
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], "example.png", { type: "image/png" });
}
