"""Write images of twenty classes in the layout of ImageNet, to try a recipe without ImageNet.

    python examples/synthetic_imagenet.py /tmp/imagenet
    IMAGENET=/tmp/imagenet tfdist train --config=imagenet_resnet34 --config.data.image_size=64

A class is one of four patterns in one of five colours, of random size, place and brightness, on
noise. The files are JPEGs of ImageNet's sizes.
"""

import argparse
import csv
import pathlib

import numpy as np
from PIL import Image

COLOURS = {
    "red": (0.9, 0.2, 0.2),
    "green": (0.2, 0.8, 0.3),
    "blue": (0.2, 0.3, 0.9),
    "yellow": (0.9, 0.8, 0.2),
    "violet": (0.7, 0.2, 0.8),
}
PATTERNS = ("rows", "columns", "squares", "rings")
CLASSES = [(colour, pattern) for colour in COLOURS for pattern in PATTERNS]
SIZES = ((500, 375), (375, 500), (500, 333), (400, 300), (640, 480))  # width, height


def picture(colour, pattern, random):
    """Return an image of a class, uint8 `[height, width, 3]`."""
    width, height = SIZES[random.integers(len(SIZES))]
    y, x = np.mgrid[:height, :width] / random.uniform(40, 80) + random.uniform(0, 1, [2, 1, 1])
    wave = {
        "rows": np.sin(2 * np.pi * y),
        "columns": np.sin(2 * np.pi * x),
        "squares": np.sin(2 * np.pi * x) * np.sin(2 * np.pi * y),
        "rings": np.sin(2 * np.pi * np.hypot(x - x.mean(), y - y.mean())),
    }[pattern]
    shade = random.uniform(0.5, 1.0) * (0.5 + 0.5 * wave)
    noise = random.normal(0, 0.08, [height, width, 1])
    pixels = 255 * (shade[..., np.newaxis] * COLOURS[colour] + noise)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def write(root, train, validation, folders=False, seed=0):
    """Write a tree.

    Args:
        root: Directory to write to.
        train: Number of training images of a class.
        validation: Number of validation images of a class.
        folders: Whether each split has a directory for each class; default: as Kaggle packs it.
        seed: Seed of the images.
    """
    random = np.random.default_rng(seed)
    root = pathlib.Path(root)
    images = root if folders else root / "ILSVRC" / "Data" / "CLS-LOC"
    root.mkdir(parents=True, exist_ok=True)
    synsets = [f"n{number:08}" for number in range(len(CLASSES))]
    if not folders:
        with open(root / "LOC_synset_mapping.txt", "w", encoding="utf-8") as file:
            for synset, (colour, pattern) in zip(synsets, CLASSES, strict=True):
                file.write(f"{synset} {colour} {pattern}\n")
    for split, count in (("train", train), ("val", validation)):
        rows = []
        for synset, (colour, pattern) in zip(synsets, CLASSES, strict=True):
            directory = images / split
            if folders or split == "train":  # Kaggle's validation images lie in one directory
                directory /= synset
            directory.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                name = f"{synset}_{split}_{number}"
                image = Image.fromarray(picture(colour, pattern, random))
                image.save(directory / f"{name}.JPEG", quality=90)
                rows.append((name, f"{synset} 0 0 {image.width} {image.height}"))
        if not folders:
            with open(root / f"LOC_{split}_solution.csv", "w", encoding="utf-8") as file:
                csv.writer(file).writerows([("ImageId", "PredictionString"), *rows])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", metavar="DIRECTORY", help="directory to write to")
    parser.add_argument("--train", type=int, default=60, metavar="N", help="images of a class (60)")
    parser.add_argument(
        "--validation", type=int, default=10, metavar="N", help="images of a class (10)"
    )
    parser.add_argument(
        "--folders", action="store_true", help="a directory for each class, no CSV files"
    )
    args = parser.parse_args()
    write(args.root, args.train, args.validation, args.folders)


if __name__ == "__main__":
    main()
