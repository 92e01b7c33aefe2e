"""Finds the lines of text where the detector saw some, and cuts them out of the picture.

Source of the method and of its numbers: DBPostProcess of the rapidocr-onnxruntime package, with its default ratio of 2:
with the 1.6 that the package sets, fewer spaces are read. The boxes are rectangles, so they are widened by their sides;
the package does it for any polygon.
"""

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

PIXEL_THRESHOLD = 0.3
BOX_THRESHOLD = 0.5
MIN_SIDE = 3
UNCLIP_RATIO = 2.0
LINE_HEIGHT = 48
MIN_LINE_WIDTH = 320


class TritonPythonModel:
    """Cuts the lines of text out of pictures."""

    def execute(self, requests):
        return [pb_utils.InferenceResponse(tensors_of(request)) for request in requests]


def tensors_of(request):
    picture = pb_utils.get_input_tensor_by_name(request, "PICTURE").as_numpy()
    likelihood = pb_utils.get_input_tensor_by_name(request, "LIKELIHOOD").as_numpy()[0, 0]
    boxes = boxes_in(likelihood, picture)
    return [pb_utils.Tensor("BOX", boxes), pb_utils.Tensor("LINES", padded([line(picture, box) for box in boxes]))]


def boxes_in(likelihood, picture):
    """fp32 [k, 4, 2]: corners (x, y) of the lines in the picture, clockwise from the upper left, in reading order."""
    mask = cv2.dilate((likelihood > PIXEL_THRESHOLD).astype(np.uint8), np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    rectangles = [cv2.minAreaRect(contour) for contour in contours]
    height, width = picture.shape[:2]
    scale = np.array([width / likelihood.shape[1], height / likelihood.shape[0]], np.float32)
    boxes = [
        np.clip(clockwise(cv2.boxPoints(widened(rectangle))) * scale, 0, (width - 1, height - 1))
        for rectangle in rectangles
        if min(rectangle[1]) >= MIN_SIDE and mean_inside(likelihood, cv2.boxPoints(rectangle)) >= BOX_THRESHOLD
    ]
    return np.array(in_reading_order(boxes), np.float32).reshape(-1, 4, 2)


def mean_inside(likelihood, corners):
    mask = np.zeros(likelihood.shape, np.uint8)
    cv2.fillPoly(mask, [corners.astype(np.int32)], 1)
    return cv2.mean(likelihood, mask)[0]


def widened(rectangle):
    """The network marks the core of a line only."""
    center, (width, height), angle = rectangle
    margin = UNCLIP_RATIO * width * height / (width + height)
    return center, (width + margin, height + margin), angle


def clockwise(corners):
    """The same corners from the upper left one on: of the two leftmost, the upper one."""
    by_x = corners[np.argsort(corners[:, 0])]
    left, right = (pair[np.argsort(pair[:, 1])] for pair in (by_x[:2], by_x[2:]))
    return np.array([left[0], right[0], right[1], left[1]])


def in_reading_order(boxes):
    """From the top down; what begins less than half a line below the first of its row is in the same row."""
    rows = []
    for box in sorted(boxes, key=lambda box: box[0, 1]):
        if rows and box[0, 1] - rows[-1][0][0, 1] < np.linalg.norm(box[3] - box[0]) / 2:
            rows[-1].append(box)
        else:
            rows.append([box])
    return [box for row in rows for box in sorted(row, key=lambda box: box[0, 0])]


def line(picture, box):
    """fp32 [3, 48, width]: the line upright, values in -1 .. 1."""
    width = max(1, int(max(np.linalg.norm(box[1] - box[0]), np.linalg.norm(box[2] - box[3]))))
    height = max(1, int(max(np.linalg.norm(box[3] - box[0]), np.linalg.norm(box[2] - box[1]))))
    upright = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    strip = cv2.warpPerspective(
        picture,
        cv2.getPerspectiveTransform(box, upright),
        (width, height),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    if height >= 1.5 * width:  # a line that goes up or down
        strip = np.rot90(strip)
    strip = cv2.resize(strip, (int(np.ceil(LINE_HEIGHT * strip.shape[1] / strip.shape[0])), LINE_HEIGHT))
    return strip.astype(np.float32).transpose(2, 0, 1) / 127.5 - 1


def padded(lines):
    """fp32 [k, 3, 48, widest]: grey behind the shorter ones, as the network was trained.

    A picture without text gives one grey line, for a network takes no batch of none. It has no box, and is not read.
    """
    width = max([MIN_LINE_WIDTH, *(line.shape[2] for line in lines)])
    batch = np.zeros((max(1, len(lines)), 3, LINE_HEIGHT, width), np.float32)
    for row, line in zip(batch, lines, strict=False):
        row[:, :, : line.shape[2]] = line
    return batch
