"""What is on these images? Asks an exported model; needs onnxruntime, numpy and pillow, no torch.

feddumap export runs/first --to onnx
python examples/predict.py runs/first/model.onnx cat.png dog.jpg
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, UnidentifiedImageError


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the likeliest classes of images.")
    parser.add_argument("model", type=Path, help="a file that `feddumap export --to onnx` wrote")
    parser.add_argument("images", nargs="+", type=Path, help="images of any size and kind")
    parser.add_argument("--top", type=int, default=3, help="classes to print for each image")
    given = parser.parse_args()
    if not given.model.is_file():
        sys.exit(f"predict: there is no file {given.model}: make one with `feddumap export DIR --to onnx`")

    session = onnxruntime.InferenceSession(given.model)
    told = session.get_modelmeta().custom_metadata_map.get("feddumap")
    if told is None:
        sys.exit(
            f"predict: {given.model} does not name its classes: give a file that `feddumap export` wrote"
        )
    card = json.loads(told)
    if card["input"]["kind"] != "image":
        sys.exit(f"predict: {given.model} does not take images but {card['input']['kind']}")
    batch = np.stack([read(path, card["input"]["shape"][1:]) for path in given.images])
    (logits,) = session.run([card["output"]["name"]], {card["input"]["name"]: batch})

    for path, chances in zip(given.images, softmax(logits), strict=True):
        best = np.argsort(-chances, kind="stable")[: given.top]
        print(f"{path}: " + ", ".join(f"{card['classes'][i]} {chances[i]:.1%}" for i in best))


def read(path: Path, size: list[int]) -> np.ndarray:
    """An image as the model takes it: grey or RGB, its size, channels first, bytes / 255."""
    channels, height, width = size
    try:
        image = Image.open(path).convert("L" if channels == 1 else "RGB")
    except (OSError, UnidentifiedImageError) as error:
        sys.exit(f"predict: cannot read the image {path} ({error}): give a PNG, JPEG or the like")
    if image.size != (width, height):
        print(f"{path}: resized from {image.width}×{image.height} to {width}×{height}", file=sys.stderr)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.float32).reshape(height, width, channels).transpose(2, 0, 1) / 255


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    main()
