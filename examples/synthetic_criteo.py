"""Write clicks in the format of Criteo's data sets, to try a recommender without them.

    python examples/synthetic_criteo.py /tmp/criteo
    python examples/recommender.py --train=/tmp/criteo/train.txt --test=/tmp/criteo/test.txt

A line is a label, 13 counts and 26 categories of eight hexadecimal digits, with tabs between them.
A twentieth of the counts and categories is missing. Few categories are frequent and most are rare.
"""

import argparse
import pathlib

import numpy as np

COUNTS = 13
CATEGORIES = 26
VALUES = 100  # of each category
MISSING = 0.05


def rows(examples, random):
    """Return labels `[examples]`, counts `[examples, 13]` and categories `[examples, 26]`."""
    hidden = np.random.default_rng(0)  # what a model can learn, the same in all files
    appeal = hidden.normal(size=(CATEGORIES, VALUES))
    weights = hidden.normal(size=COUNTS) / 4
    counts = random.geometric(0.1, (examples, COUNTS)) - 1
    categories = (VALUES * random.random((examples, CATEGORIES)) ** 4).astype(int)
    score = appeal[np.arange(CATEGORIES), categories].sum(1) + np.log1p(counts) @ weights
    labels = random.random(examples) < 1 / (1 + np.exp(np.median(score) + 1 - score))
    return labels.astype(int), counts, categories


def write(path, examples, seed):
    """Write a file of so many lines; the seed makes its examples."""
    random = np.random.default_rng(seed)
    labels, counts, categories = rows(examples, random)
    names = np.random.default_rng(1).integers(0, 2**32, (CATEGORIES, VALUES))
    words = np.char.mod("%08x", names[np.arange(CATEGORIES), categories])
    table = np.concatenate([labels[:, np.newaxis].astype(str), counts.astype(str), words], axis=1)
    table[:, 1:][random.random((examples, COUNTS + CATEGORIES)) < MISSING] = ""
    path.write_text("".join("\t".join(row) + "\n" for row in table))


def main():
    """Write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=pathlib.Path, help="where to write train.txt, test.txt")
    parser.add_argument("--train", type=int, default=50_000, help="lines of train.txt")
    parser.add_argument("--test", type=int, default=10_000, help="lines of test.txt")
    flags = parser.parse_args()
    flags.directory.mkdir(parents=True, exist_ok=True)
    write(flags.directory / "train.txt", flags.train, seed=2)
    write(flags.directory / "test.txt", flags.test, seed=3)


if __name__ == "__main__":
    main()
